"""Timing of several actions in turns, so that what disturbs the machine disturbs all of them alike.

A ratio is the median of the ratios within the rounds, not the ratio of the medians: clock,
neighbors and page tables change slowly, so that within a round they are nearly the same for both.

Seconds are processor seconds of this process, all its threads together, because other processes
that take the core for a while are no property of what is measured; nothing here waits for anything
but memory. Several threads against one are compared by the clock on the wall. The share of the time
that others took is reported too (`waited_share`); where it is large, caches and memory were shared
as well.

A neighbor on the other hardware thread of a core takes nothing of the processor seconds and up to
half of the arithmetic. A probe, a loop of one-cycle instructions, detects that: around each round
it measures how fast the core is, and `in_turns` can go on for a given number of seconds until
there are enough rounds in which the core was this process's own. Rounds are chosen by the probe,
never by what was measured.

`MemoryLimits` are what this machine's memory can do at best, measured beside a codec and counted as
it counts fp32: a copy of 1 GB in a second moves 2 GB, an addition in place too.

    memcpy          the C library's, from one array to another
    read            load everything, keep a sum
    stream_store    non-temporal stores, which do not read what they overwrite; native code only
    add             array += 1 in place
"""

from __future__ import annotations

import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Thread
from typing import Any

import numpy as np
from attrs import frozen

from fsl_codecs import new_vector

GB = 1e9

Action = Callable[[], object]

UNDISTURBED_SHARE = 0.9
"""Of the fastest rate that a probe has measured: a round with less is disturbed. A busy neighbor
halves the rate."""


class CoreProbe:
    """How fast this core does simple instructions, in 10^9 a second, and the fastest so far.

    `short_loop(turns)` runs so many turns of one cycle each.
    """

    def __init__(self, short_loop: Callable[[int], None], turns: int = 1_000_000) -> None:
        self._short_loop, self._turns = short_loop, turns
        self.fastest = 0.0
        for _ in range(20):
            self.rate()

    def rate(self) -> float:
        """Measure; takes less than a millisecond."""
        start = time.perf_counter()
        self._short_loop(self._turns)
        found = self._turns / max(time.perf_counter() - start, 1e-9) / GB
        self.fastest = max(self.fastest, found)
        return found


@frozen
class Rounds:
    """Seconds that each action took, one for each round."""

    seconds: Mapping[str, tuple[float, ...]]
    waited_share: float = 0.0
    """Share of the whole time in which this process did not run."""
    core_rate: float | None = None
    """The median of the rounds' rates of the core, in 10^9 simple instructions a second. A round's
    rate is the lowest around one of its actions."""
    undisturbed_share: float | None = None
    """Of the rounds that count, how many had the core to themselves."""
    left_out: int = 0
    """Rounds that do not count, because enough others were less disturbed."""

    @property
    def count(self) -> int:
        """How many rounds there were."""
        return min(map(len, self.seconds.values()), default=0)

    def gb_s(self, name: str, moved_bytes: int) -> float | None:
        """10^9 bytes in a second, by the median; None for an action that was not measured."""
        if name not in self.seconds:
            return None
        return float(f"{moved_bytes / statistics.median(self.seconds[name]) / GB:.4g}")

    def spread(self, name: str) -> float | None:
        """(slowest - fastest) / median."""
        if name not in self.seconds:
            return None
        seconds = self.seconds[name]
        return round((max(seconds) - min(seconds)) / statistics.median(seconds), 3)

    def ratio(self, name: str, other: str) -> float | None:
        """How many times as fast `name` was as `other`, for the same work."""
        if name not in self.seconds or other not in self.seconds:
            return None
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return float(f"{statistics.median(theirs / ours for ours, theirs in pairs):.4g}")


@frozen
class _Round:
    seconds: tuple[float, ...]
    core_rate: float


def in_turns(
    actions: Mapping[str, Action],
    repeats: int,
    limit_s: float,
    *,
    by_wall_clock: bool = False,
    probe: CoreProbe | None = None,
    patience_s: float = 0.0,
) -> Rounds:
    """Run all actions once unmeasured, then in turns `repeats` times.

    Fewer, but at least once, when `limit_s` is over. With a probe it goes on for up to `patience_s`
    more until `repeats` rounds are undisturbed; those that were disturbed least count.
    """
    for action in actions.values():
        action()
    clock = time.perf_counter if by_wall_clock else time.process_time
    begun, begun_running = time.perf_counter(), time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()
    rounds: list[_Round] = []
    try:
        while True:
            rounds.append(_one_round(actions.values(), clock, probe))
            passed = time.perf_counter() - begun
            if probe is None:
                if len(rounds) >= repeats or passed > limit_s:
                    break
                continue
            quiet = sum(one.core_rate >= UNDISTURBED_SHARE * probe.fastest for one in rounds)
            if quiet >= repeats or passed > limit_s + patience_s:
                break
            if len(rounds) >= repeats and patience_s == 0:
                break
    finally:
        if was_enabled:
            gc.enable()
    passed, running = time.perf_counter() - begun, time.process_time() - begun_running
    waited = round(1 - min(running / passed, 1.0), 3)
    taken = _least_disturbed(rounds, repeats)
    by_name = zip(*(one.seconds for one in taken), strict=True)
    seconds = dict(zip(actions, by_name, strict=True))
    if probe is None:
        return Rounds(seconds, waited)
    rates = [one.core_rate for one in taken]
    quiet_share = sum(rate >= UNDISTURBED_SHARE * probe.fastest for rate in rates) / len(rates)
    return Rounds(
        seconds,
        waited,
        round(statistics.median(rates), 2),
        round(quiet_share, 2),
        len(rounds) - len(taken),
    )


def _one_round(
    actions: Iterable[Action], clock: Callable[[], float], probe: CoreProbe | None
) -> _Round:
    lowest = probe.rate() if probe is not None else 0.0
    seconds = []
    for action in actions:
        start = clock()
        action()
        seconds.append(max(clock() - start, 1e-9))
        if probe is not None:
            lowest = min(lowest, probe.rate())
    return _Round(tuple(seconds), lowest)


def _least_disturbed(rounds: Sequence[_Round], wanted: int) -> Sequence[_Round]:
    """As many as are wanted, in their order; the earlier one of two alike."""
    places = sorted(range(len(rounds)), key=lambda place: -rounds[place].core_rate)[:wanted]
    return [rounds[place] for place in sorted(places)]


# --- the limits of memory ---


NAMES = ("memcpy", "read", "stream_store", "add")


def native_module() -> Any:
    """The codec's native module; None without it."""
    try:
        return importlib.import_module("fsl_codecs._native")
    except ImportError:
        return None


def core_probe() -> CoreProbe | None:
    """A probe of this core's speed; None without the native module, whose loop it needs."""
    native = native_module()
    return CoreProbe(native.short_loop) if hasattr(native, "short_loop") else None


class MemoryLimits:
    """Holds two arrays of `values` fp32 values and the loops over them."""

    def __init__(self, values: int) -> None:
        self._source, self._target = new_vector(values), new_vector(values)
        self._source.fill(1)
        self._target.fill(1)
        self._native = native_module()
        self._is_native = hasattr(self._native, "limit_read")

    @property
    def measured_with(self) -> str:
        """The implementation of the loops: "native" or "numpy"."""
        return "native" if self._is_native else "numpy"

    def actions(self) -> Mapping[str, Action]:
        """One pass over the arrays each, by name."""
        source, target, native = self._source, self._target, self._native
        memcpy = {"memcpy": lambda: np.copyto(target, source)}
        if not self._is_native:
            words = source.view(np.int32)
            return memcpy | {
                "read": words.max,
                "add": lambda: np.add(target, np.float32(1), out=target),
            }
        stream_store = {"stream_store": lambda: native.limit_stream_store(target)}
        return {
            **memcpy,
            "read": lambda: native.limit_read(source),
            **(stream_store if native.limit_stream_store(target) else {}),
            "add": lambda: native.limit_add(target),
        }

    def copy_by(self, threads: int) -> Action:
        """Return a copy of the arrays by so many threads, which shows what their memory allows."""
        edges = [self._source.size * part // threads for part in range(threads + 1)]
        own, *others = [
            (self._target[begin:end], self._source[begin:end])
            for begin, end in itertools.pairwise(edges)
        ]

        def copy() -> None:
            helpers = [Thread(target=np.copyto, args=part) for part in others]
            for helper in helpers:
                helper.start()
            np.copyto(*own)
            for helper in helpers:
                helper.join()

        return copy

    def fields(self, rounds: Rounds) -> dict[str, Any]:
        """Return the members of a row: each limit in GB/s."""
        moved = self._source.nbytes
        speeds = {f"{name}_gb_s": rounds.gb_s(name, moved) for name in NAMES}
        return speeds | {"limits_measured_with": self.measured_with}

"""`fsl-node bench transport`: chunks from one process to another, beside a plain TCP stream.

The other process is here, or on another machine, where ssh starts it.

A ratio is the median of the ratios within the rounds (see timing.py). Speeds are payload by the
clock on the wall, counted where it arrives, after a warm-up; `whole` counts from the first byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from attrs import evolve, field, frozen

from fsl_async.errors import UsageError
from fsl_async.tools.bench.transport_task import START_S, Task
from fsl_async.tools.running import running

if TYPE_CHECKING:
    from fsl_async.tools.netlab.laboratory import Laboratory

OURS = "fsl"


@frozen
class TransportBenchSettings:
    """What to measure.

    `stripes` 0: chosen by measurement while it sends. `net`: words of `netlab set`, or none for
    loopback. `to`: "[USER@]HOST[:PORT]", the listener's machine, and `python` the interpreter
    there; without a port it takes a free one. `others`: the ways beside ours.
    """

    chunks_bytes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20)
    stripes: tuple[int, ...] = (1,)
    curve: tuple[bool, ...] = (False,)
    net: tuple[str, ...] = ()
    to: str = ""
    python: str = sys.executable
    congestion: str = "cubic"
    down: bool = False
    others: tuple[str, ...] = ("tcp",)
    rounds: int = 3
    warm_s: float = 0.5
    measure_s: float = 2.0

    @property
    def where(self) -> str:
        """What lies between the two processes, in a word of a row."""
        return self.to or " ".join(self.net) or "loopback"


@frozen
class Case:
    """One way to move chunks."""

    way: str
    chunk_bytes: int
    stripes: int = 1
    curve: bool = False


@frozen
class Places:
    """Where the two processes run and how they reach each other.

    The dialer dials `address`. `ssh`: the destination that runs the listener, which then listens at
    `port` (0: a free one) of all its addresses.
    """

    address: str = "127.0.0.1"
    lab: Laboratory | None = None
    sites: tuple[str, str] = field(default=("server", "client"))
    ssh: str = ""
    port: int = 0

    def command(self, listens: bool, words: Sequence[str]) -> list[str]:
        """Words that run a process at the place of the listener or of the dialer."""
        if listens and self.ssh:
            return ["ssh", "-o", "BatchMode=yes", "--", self.ssh, shlex.join(words)]
        if self.lab is None:
            return list(words)
        return list(self.lab.command(self.sites[0 if listens else 1], words))


@frozen
class Way:
    """How chunks are moved. `measure` gives `bytes` and `seconds`, and more where it can."""

    measure: Callable[[TransportBenchSettings, Places, Case], dict[str, Any]]
    has_curve: bool = False


def between_processes(
    program: Sequence[str], settings: TransportBenchSettings, places: Places, case: Case
) -> dict[str, Any]:
    """Run a listener and a dialer; `program` are the interpreter's arguments before the task."""
    keys = None
    if case.curve:
        public, secret = zmq.curve_keypair()
        keys = (public.decode(), secret.decode())
    down = settings.down and case.way == OURS
    task = Task(
        way=case.way,
        sends=down,
        address="0.0.0.0" if places.ssh else places.address,  # noqa: S104 - for seconds
        port=places.port,
        chunk_bytes=case.chunk_bytes,
        stripes=case.stripes,
        down=down,
        keys=keys,
        warm_s=settings.warm_s,
        measure_s=settings.measure_s,
        pings=not places.ssh,  # two machines have two clocks
    )
    with contextlib.ExitStack() as stack:
        there = task.command(program, settings.python)
        listener = stack.enter_context(running(places.command(True, there)))
        port = int(json.loads(listener.line(START_S))["port"])
        other = evolve(task, sends=not down, address=places.address, port=port)
        dialer = stack.enter_context(running(places.command(False, other.command(program))))
        receiver = dialer if down else listener
        return dict(json.loads(receiver.line(task.limit_s)))


_END = partial(between_processes, ("-P", "-m", "fsl_async.tools.bench.transport_end"))
WAYS = {OURS: Way(_END, has_curve=True), "tcp": Way(_END)}


def run(
    settings: TransportBenchSettings,
    progress: Callable[[str], None],
    ways: Mapping[str, Way] = WAYS,
) -> Iterator[dict[str, Any]]:
    """Measure, one row after the other. Raises UsageError for other ways than `ways`."""
    unknown = [name for name in settings.others if name == OURS or name not in ways]
    if unknown:
        there = ", ".join(name for name in ways if name != OURS)
        raise UsageError(f"no such way {unknown[0]!r} to move bytes: use {there} or none")
    yield {
        "bench": "transport",
        "row": "machine",
        "net": settings.where,
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%d"),
    }
    with _places(settings) as places:
        for chunk_bytes in settings.chunks_bytes:
            for curve in settings.curve:
                yield from _group(settings, places, ways, (chunk_bytes, curve), progress)


@contextlib.contextmanager
def _places(settings: TransportBenchSettings) -> Iterator[Places]:
    if settings.to and settings.net:
        raise UsageError("--to and --net: one of them says where the other process is")
    if settings.to:
        ssh, _, port = settings.to.partition(":")
        if (
            not ssh
            or ssh.startswith("-")
            or not (port or "0").isdecimal()
            or int(port or 0) > 65535
        ):
            raise UsageError(f"--to {settings.to[:80]!r}: write [USER@]HOST or [USER@]HOST:PORT")
        yield Places(ssh.rpartition("@")[2], ssh=ssh, port=int(port or 0))
        return
    if not settings.net:
        yield Places()
        return
    from fsl_async.tools.netlab.laboratory import Laboratory

    with Laboratory(["server", "client"]) as lab:
        lab.set("all", *settings.net)
        for site in lab.sites:
            lab.set_congestion(site, settings.congestion)
        yield Places(lab.address("server"), lab)


def _group(
    settings: TransportBenchSettings,
    places: Places,
    ways: Mapping[str, Way],
    size: tuple[int, bool],
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """All ways to move chunks of one size, with CURVE or without, in turns."""
    chunk_bytes, curve = size
    cases = [Case(OURS, chunk_bytes, stripes, curve) for stripes in settings.stripes]
    # Where a way has no CURVE, it would be the same measurement again.
    cases += [
        Case(way, chunk_bytes, 1, curve)
        for way in settings.others
        if ways[way].has_curve or not curve
    ]
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(settings.rounds):
        for case in cases:
            progress(f"round {number + 1}: {_title(case)}")
            found[case].append(ways[case.way].measure(settings, places, case))
    for case in cases:
        yield _row(settings, places, case, found)


def _title(case: Case) -> str:
    parts = [case.way, f"{case.chunk_bytes >> 10} KiB"]
    if case.way == OURS:
        parts.append(f"{case.stripes or 'auto'} stripes")
    if case.curve:
        parts.append("CURVE")
    return ", ".join(parts)


def _speed(found: dict[str, Any], whole: str = "") -> float:
    return float(found[f"{whole}bytes"] / max(found[f"{whole}seconds"], 1e-9))


def _row(
    settings: TransportBenchSettings,
    places: Places,
    case: Case,
    found: dict[Case, list[dict[str, Any]]],
) -> dict[str, Any]:
    rounds = found[case]
    speeds = [_speed(one) for one in rounds]
    middle = statistics.median(speeds)
    row: dict[str, Any] = {
        "bench": "transport",
        "row": "way",
        "net": settings.where,
        "backend": places.lab.backend if places.lab is not None else None,
        "congestion": settings.congestion if settings.net else None,
        "way": case.way,
        "chunk_kib": case.chunk_bytes >> 10,
        "stripes": (case.stripes or "auto") if case.way == OURS else None,
        "curve": case.curve,
        "down": settings.down and case.way == OURS,
        "rounds": len(rounds),
        "gb_s": float(f"{middle / 1e9:.4g}"),
        "mbit_s": float(f"{middle * 8e-6:.4g}"),
        "spread": round((max(speeds) - min(speeds)) / middle, 3),
        "warm_s": settings.warm_s,
        "seconds": settings.measure_s,
        "load_1m": round(os.getloadavg()[0], 2),
    }
    for other in settings.others:
        same = [one for one in found if one.way == other]
        if same and case.way == OURS:
            theirs = [_speed(one) for one in found[same[0]]]
            ratios = [ours / their for ours, their in zip(speeds, theirs, strict=True)]
            row[f"over_{other}"] = float(f"{statistics.median(ratios):.4g}")
    if "whole_bytes" in rounds[0]:
        row["whole_mbit_s"] = float(
            f"{statistics.median(_speed(one, 'whole_') for one in rounds) * 8e-6:.4g}"
        )
    for name in ("control_worst_s", "longest_gap_s"):
        values = [one[name] for one in rounds if name in one]
        if values and case.way == OURS:
            row[name] = round(max(values), 4)
    return row

"""`fsl-node bench transport`: chunks from one process to another, by fsl_transport and beside it by others, in turns.

A ratio is the median of the ratios within the rounds (see timing.py). Speeds are payload by the clock on the wall, counted where it
arrives, after a warm-up; `whole` counts from the first byte.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq
from attrs import evolve, field, frozen

from fsl_async.errors import UsageError
from fsl_async.tools.bench.transport_peer import Task
from fsl_async.tools.netlab.host import LabError, running

if TYPE_CHECKING:
    from fsl_async.tools.netlab.laboratory import Laboratory

START_S = 20.0
"""How long a process may take to begin."""
OTHERS = ("pyzmq", "tcp", "grpc", "iperf3")


@frozen
class TransportBenchSettings:
    """What to measure. `stripes` 0: chosen by measurement while it sends. `net`: words of `netlab set`, or none for loopback."""

    chunks_bytes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20)
    stripes: tuple[int, ...] = (1,)
    curve: tuple[bool, ...] = (False,)
    net: tuple[str, ...] = ()
    congestion: str = "cubic"
    down: bool = False
    others: tuple[str, ...] = OTHERS
    rounds: int = 3
    warm_s: float = 0.5
    measure_s: float = 2.0


@frozen
class Case:
    """One way to move chunks."""

    way: str
    chunk_bytes: int
    stripes: int = 1
    curve: bool = False


@frozen
class Places:
    """Where the two processes run and how they reach each other."""

    address: str = "127.0.0.1"
    lab: Laboratory | None = None
    sites: tuple[str, str] = field(default=("server", "client"))

    def command(self, listens: bool, words: Sequence[str]) -> list[str]:
        """Words that run a process at the place of the listener or of the dialer."""
        if self.lab is None:
            return list(words)
        return list(self.lab.command(self.sites[0 if listens else 1], words))


def missing() -> list[str]:
    """Others that are not installed."""
    found = []
    if importlib.util.find_spec("grpc") is None:
        found.append("grpc")
    if shutil.which("iperf3") is None:
        found.append("iperf3")
    return found


def run(
    settings: TransportBenchSettings, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure, one row after the other."""
    unknown = [name for name in settings.others if name not in OTHERS]
    if unknown:
        raise UsageError(f"no such way {unknown[0]!r} to move bytes: use {', '.join(OTHERS)}")
    absent = missing()
    yield {
        "bench": "transport",
        "row": "machine",
        "net": " ".join(settings.net) or "loopback",
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "not_installed": [name for name in absent if name in settings.others],
        "at": time.strftime("%Y-%m-%d"),
    }
    others = [name for name in settings.others if name not in absent]
    with _places(settings) as places:
        for chunk_bytes in settings.chunks_bytes:
            for curve in settings.curve:
                yield from _group(settings, places, others, (chunk_bytes, curve), progress)


@contextlib.contextmanager
def _places(settings: TransportBenchSettings) -> Iterator[Places]:
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
    others: Sequence[str],
    size: tuple[int, bool],
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """All ways to move chunks of one size, with CURVE or without, in turns."""
    chunk_bytes, curve = size
    cases = [Case("fsl", chunk_bytes, stripes, curve) for stripes in settings.stripes]
    # Only bare pyzmq has CURVE; the rest would be the same measurement again.
    cases += [Case(way, chunk_bytes, 1, curve) for way in others if way == "pyzmq" or not curve]
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(settings.rounds):
        for case in cases:
            progress(f"round {number + 1}: {_title(case)}")
            found[case].append(_one(settings, places, case))
    for case in cases:
        yield _row(settings, places, case, found)


def _title(case: Case) -> str:
    parts = [case.way, f"{case.chunk_bytes >> 10} KiB"]
    if case.way == "fsl":
        parts.append(f"{case.stripes or 'auto'} stripes")
    if case.curve:
        parts.append("CURVE")
    return ", ".join(parts)


def _one(settings: TransportBenchSettings, places: Places, case: Case) -> dict[str, Any]:
    if case.way == "iperf3":
        return _iperf3(settings, places, case)
    keys = None
    if case.curve:
        public, secret = zmq.curve_keypair()
        keys = (public.decode(), secret.decode())
    down = settings.down and case.way == "fsl"
    task = Task(
        way=case.way, sends=down, address=places.address, chunk_bytes=case.chunk_bytes,
        stripes=case.stripes, down=down, keys=keys, warm_s=settings.warm_s, measure_s=settings.measure_s,
    )  # fmt: skip
    limit_s = settings.warm_s + settings.measure_s
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(running(places.command(True, task.words)))
        port = int(json.loads(listener.line(START_S))["port"])
        other = evolve(task, sends=not down, port=port)
        dialer = stack.enter_context(running(places.command(False, other.words)))
        receiver = dialer if down else listener
        # A line that crawls takes longer than the time that is measured: its first chunk may be late.
        return dict(json.loads(receiver.line(3 * limit_s + 3 * START_S)))


def _iperf3(settings: TransportBenchSettings, places: Places, case: Case) -> dict[str, Any]:
    """One TCP stream of iperf3 with its writes of the chunk's size, at most 1 MiB."""
    path = shutil.which("iperf3")
    assert path is not None
    seconds = max(1, round(settings.measure_s))
    serve = places.command(True, [path, "-s", "-1", "--forceflush", "-B", places.address])
    with running(serve) as server:
        while "listening" not in server.line(START_S):
            continue
        words = [
            path, "-c", places.address, "-J", "-t", str(seconds), "-O", str(max(1, round(settings.warm_s))),
            "-l", str(min(case.chunk_bytes, 1 << 20)),
        ]  # fmt: skip
        done = subprocess.run(  # noqa: S603 - the words are ours
            places.command(False, words),
            capture_output=True,
            text=True,
            timeout=3 * seconds + START_S,
            check=False,
        )
    received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
    if not received:
        raise LabError(f"iperf3 measured nothing: {(done.stderr or done.stdout)[:200]}")
    return {"bytes": received["bytes"], "seconds": received["seconds"]}


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
        "net": " ".join(settings.net) or "loopback",
        "backend": places.lab.backend if places.lab is not None else None,
        "congestion": settings.congestion if settings.net else None,
        "way": case.way,
        "chunk_kib": case.chunk_bytes >> 10,
        "stripes": (case.stripes or "auto") if case.way == "fsl" else None,
        "curve": case.curve,
        "down": settings.down and case.way == "fsl",
        "rounds": len(rounds),
        "gb_s": float(f"{middle / 1e9:.4g}"),
        "mbit_s": float(f"{middle * 8e-6:.4g}"),
        "spread": round((max(speeds) - min(speeds)) / middle, 3),
        "warm_s": settings.warm_s,
        "seconds": settings.measure_s,
        "load_1m": round(os.getloadavg()[0], 2),
    }
    for other in ("pyzmq", "tcp"):
        same = [one for one in found if one.way == other]
        if same and case.way == "fsl":
            theirs = [_speed(one) for one in found[same[0]]]
            ratios = [ours / their for ours, their in zip(speeds, theirs, strict=True)]
            row[f"over_{other}"] = float(f"{statistics.median(ratios):.4g}")
    if "whole_bytes" in rounds[0]:
        row["whole_mbit_s"] = float(
            f"{statistics.median(_speed(one, 'whole_') for one in rounds) * 8e-6:.4g}"
        )
    for name in ("control_worst_s", "longest_gap_s"):
        values = [one[name] for one in rounds if name in one]
        if values and case.way == "fsl":
            row[name] = round(max(values), 4)
    return row

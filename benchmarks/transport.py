"""The transport: chunks from one process to another, beside TCP: `fsl-node bench transport`.

    python benchmarks/transport.py [--chunks 64,256,1024] [--curve both] [--rounds 5]
    python benchmarks/transport.py --net transatlantic --stripes auto,64 --others pyzmq,tcp
    python benchmarks/transport.py --others tcp,pyzmq,grpc,iperf3

All ways are measured in turns in the same run, by ends of transport_end.py. grpcio
comes with `pip install 'fsl-async[bench]'`; ways that are not installed are left out, and the first
row names them. The other process is here, or on another machine, where ssh starts it.

A ratio is the median of the ratios within the rounds (see codec_timing.py). Speeds are payload by
the clock on the wall, counted where it arrives, after a warm-up; `whole` counts from the first
byte.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import zmq
from attrs import evolve, field, frozen
from iperf3 import iperf3
from netlab.laboratory import Laboratory
from netlab.running import running
from row_tables import Column, Row, aligned, measured, output_options
from transport_task import START_S, Task

from fsl_async.commands.options import Finite, Whole
from fsl_async.errors import UsageError

OURS = "fsl"


@frozen
class TransportBenchSettings:
    """Settings of the measurement.

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
        """Return the name of the path between the two processes, as rows show it."""
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
        address="0.0.0.0" if places.ssh else places.address,
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


def _iperf3(settings: TransportBenchSettings, places: Places, case: Case) -> dict[str, Any]:
    """One TCP stream of iperf3 with its writes of the chunk's size, at most 1 MiB."""
    received = iperf3(
        places.address,
        partial(places.command, True),
        partial(places.command, False),
        max(1, round(settings.measure_s)),
        *("-O", str(max(1, round(settings.warm_s))), "-l", str(min(case.chunk_bytes, 1 << 20))),
    )
    assert received is not None
    return {"bytes": received["bytes"], "seconds": received["seconds"]}


# Another machine has its clone in another folder: its own fsl_async finds it.
_MAIN = (
    "from fsl_async.errors import need_benchmarks; need_benchmarks('bench transport');"
    " from transport_end import main; main()"
)
_END = partial(between_processes, ("-P", "-c", _MAIN))
WAYS = {
    OURS: Way(_END, has_curve=True),
    "tcp": Way(_END),
    "pyzmq": Way(_END, has_curve=True),
    "grpc": Way(_END),
    "iperf3": Way(_iperf3),
}


def missing() -> list[str]:
    """Others that are not installed."""
    found = [] if importlib.util.find_spec("grpc") else ["grpc"]
    return found if shutil.which("iperf3") else [*found, "iperf3"]


def rows_of(
    settings: TransportBenchSettings, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure, one row after the other.

    Ways that are not installed are left out. Raises UsageError for other ways than those of `WAYS`.
    """
    unknown = [name for name in settings.others if name == OURS or name not in WAYS]
    if unknown:
        there = ", ".join(name for name in WAYS if name != OURS)
        raise UsageError(f"no such way {unknown[0]!r} to move bytes: use {there} or none")
    absent = [name for name in settings.others if name in missing()]
    settings = evolve(
        settings, others=tuple(name for name in settings.others if name not in absent)
    )
    yield {
        "bench": "transport",
        "row": "machine",
        "net": settings.where,
        "not_installed": absent,
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%d"),
    }
    with _places(settings) as places:
        for chunk_bytes in settings.chunks_bytes:
            for curve in settings.curve:
                yield from _group(settings, places, (chunk_bytes, curve), progress)


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
    with Laboratory(["server", "client"]) as lab:
        lab.set("all", *settings.net)
        for site in lab.sites:
            lab.set_congestion(site, settings.congestion)
        yield Places(lab.address("server"), lab)


def _group(
    settings: TransportBenchSettings,
    places: Places,
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
        if WAYS[way].has_curve or not curve
    ]
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(settings.rounds):
        for case in cases:
            progress(f"round {number + 1}: {_title(case)}")
            found[case].append(WAYS[case.way].measure(settings, places, case))
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


_WAY: Sequence[Column] = (
    ("way", "way"),
    ("chunk KiB", "chunk_kib"),
    ("stripes", "stripes"),
    ("CURVE", "curve"),
)
_LOOPBACK: Sequence[Column] = (*_WAY, ("GB/s", "gb_s"))
_LINK: Sequence[Column] = (
    ("net", "net"),
    *_WAY,
    ("Mbit/s", "mbit_s"),
    ("with warm-up", "whole_mbit_s"),
)
_AROUND: Sequence[Column] = (
    ("spread", "spread"),
    ("control ms", "control_worst_ms"),
    ("load", "load_1m"),
)


def transport_tables(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Loopback in GB/s, links of the laboratory in Mbit/s.

    "control ms" is the longest that a control message took beside the chunks.
    """
    shown: list[dict[str, Any]] = []
    for row in rows:
        if row["row"] == "way":
            worst = row.get("control_worst_s")
            shown.append(
                {
                    **row,
                    "stripes": None if row["stripes"] is None else str(row["stripes"]),
                    "control_worst_ms": None if worst is None else round(1e3 * worst),
                }
            )
    over = dict.fromkeys(name for row in shown for name in row if name.startswith("over_"))
    ratios = [(f"/{name.removeprefix('over_')}", name) for name in over]
    parts = []
    for is_loopback, columns in ((True, _LOOPBACK), (False, _LINK)):
        chosen = [row for row in shown if (row["net"] == "loopback") is is_loopback]
        if chosen:
            lines = aligned((*columns, *ratios, *_AROUND), chosen, markdown=markdown)
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _numbers(text: str, what: str, most: int) -> tuple[int, ...]:
    """Comma-separated whole numbers from 1 to `most`; `auto` is 0."""
    try:
        found = tuple(0 if one == "auto" and most <= 64 else int(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or any(not 0 <= one <= most for one in found):
        raise UsageError(f"{what} {text!r}: write numbers up to {most} with commas between")
    return found


@click.command("transport")
@click.option(
    "--net", metavar="PROFILE[,KEY=VALUE...]",
    help="Through the network laboratory (root): a profile, or settings as of `bin/netlab set`,"
    " delay=25ms,loss=1%. Otherwise loopback.",
)  # fmt: skip
@click.option(
    "--to", default="", metavar="[USER@]HOST[:PORT]",
    help="To another machine: ssh starts the listener there, and must not ask for a password."
    " Name a PORT that its firewall lets in; otherwise a free one is used.",
)  # fmt: skip
@click.option(
    "--python", metavar="PATH",
    help="The interpreter of a clone there.  [default: the path of this one]",
)  # fmt: skip
@click.option("--chunks", default="64,256,1024", show_default=True, help="Sizes of chunks, KiB.")
@click.option(
    "--stripes", default="1", show_default=True,
    help="Connections for bulk; auto: chosen by measurement.",
)  # fmt: skip
@click.option(
    "--curve", default="off", show_default=True, type=click.Choice(["off", "on", "both"]),
    help="Encrypted connections.",
)  # fmt: skip
@click.option("--down", is_flag=True, help="From the listener to the dialer; ours only.")
@click.option("--congestion", default="cubic", show_default=True, help="Of both sites, with --net.")
@click.option("--rounds", default=3, show_default=True, type=Whole(1, 100))
@click.option(
    "--seconds", default=2.0, show_default=True, type=Finite(0.2, 600),
    help="Measured of each transfer.",
)  # fmt: skip
@click.option("--warm", default=0.5, show_default=True, type=Finite(0, 600), help="Seconds before.")
@click.option(
    "--others", default="tcp", show_default=True,
    help="What to measure beside: tcp (a plain stream), pyzmq, grpc, iperf3; none: nothing.",
)  # fmt: skip
@output_options
def main(
    *,
    net: str | None,
    to: str,
    python: str | None,
    chunks: str,
    stripes: str,
    curve: str,
    down: bool,
    congestion: str,
    rounds: int,
    seconds: float,
    warm: float,
    others: str,
    save: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Measure the transport: chunks from one process to another, beside a plain TCP stream.

    All are measured in turns in the same run. "control ms" is the longest that a control message
    took while the chunks were under way.
    """
    settings = TransportBenchSettings(
        chunks_bytes=tuple(one * 1024 for one in _numbers(chunks, "--chunks", 2048)),
        stripes=_numbers(stripes, "--stripes", 64),
        curve={"off": (False,), "on": (True,), "both": (False, True)}[curve],
        net=tuple(net.split(",")) if net else (),
        to=to,
        python=python or sys.executable,
        congestion=congestion,
        down=down,
        others=() if others == "none" else tuple(others.split(",")),
        rounds=rounds,
        warm_s=warm,
        measure_s=seconds,
    )
    rows = measured(partial(rows_of, settings), save, as_json=as_json)
    if not as_json:
        click.echo(transport_tables(rows, markdown=markdown))


if __name__ == "__main__":
    main()

"""The transport beside others: `fsl-node bench transport`, and bare pyzmq, grpc.aio and iperf3.

    python benchmarks/transport.py [--chunks 64,256,1024] [--curve both] [--rounds 5]
    python benchmarks/transport.py --net transatlantic --stripes auto,64 --others pyzmq,tcp

The same rows with more ways, all measured in turns in the same run (transport_peers.py). grpcio
comes with `pip install 'fsl-async[bench]'`; ways that are not installed are left out, and the first
row names them. `--json` prints a JSON object for each row, `--save FILE` adds them to a file.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from fsl_async.tools.bench.tables import transport_tables
from fsl_async.tools.bench.transport import (
    WAYS,
    Case,
    Places,
    TransportBenchSettings,
    Way,
    between_processes,
    run,
)
from fsl_async.tools.bench.transport_task import START_S
from fsl_async.tools.running import running


def iperf3(settings: TransportBenchSettings, places: Places, case: Case) -> dict[str, Any]:
    """One TCP stream of iperf3 with its writes of the chunk's size, at most 1 MiB."""
    path = shutil.which("iperf3")
    assert path is not None
    seconds = max(1, round(settings.measure_s))
    serve = places.command(True, [path, "-s", "-1", "--forceflush", "-B", places.address])
    with running(serve) as server:
        while "listening" not in server.line(START_S):
            continue
        words = [
            path, "-c", places.address, "-J", "-t", str(seconds),
            "-O", str(max(1, round(settings.warm_s))), "-l", str(min(case.chunk_bytes, 1 << 20)),
        ]  # fmt: skip
        done = subprocess.run(
            places.command(False, words),
            capture_output=True,
            text=True,
            timeout=3 * seconds + START_S,
            check=False,
        )
    received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
    if not received:
        raise SystemExit(f"iperf3 measured nothing: {(done.stderr or done.stdout)[:200]}")
    return {"bytes": received["bytes"], "seconds": received["seconds"]}


_PEER = partial(between_processes, (str(Path(__file__).with_name("transport_peers.py")),))
ALL = {
    **WAYS,
    "pyzmq": Way(_PEER, has_curve=True),
    "grpc": Way(_PEER),
    "iperf3": Way(iperf3),
}


def missing() -> list[str]:
    """Others that are not installed."""
    found = [] if importlib.util.find_spec("grpc") else ["grpc"]
    return found if shutil.which("iperf3") else [*found, "iperf3"]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(0 if word == "auto" else int(word) for word in text.split(","))


@click.command()
@click.option("--net", default="", metavar="PROFILE[,KEY=VALUE...]", help="As of `bin/netlab set`.")
@click.option("--chunks", default="64,256,1024", show_default=True, help="KiB.")
@click.option("--stripes", default="1", show_default=True, help="Numbers, or auto.")
@click.option("--curve", default="off", show_default=True, type=click.Choice(["off", "on", "both"]))
@click.option("--down", is_flag=True, help="From the listener to the dialer; ours only.")
@click.option("--congestion", default="cubic", show_default=True, help="Of both sites, with --net.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Measured of each transfer.")
@click.option("--warm", default=0.5, show_default=True, help="Seconds before.")
@click.option("--others", default="pyzmq,tcp,grpc,iperf3", show_default=True)
@click.option("--save", type=Path, metavar="FILE", help="Also add the rows to this file.")
@click.option("--markdown", is_flag=True, help="Tables for a document.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
def main(
    *,
    net: str,
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
    """Measure the transport beside others."""
    begun, absent = time.monotonic(), missing()
    wanted = [] if others == "none" else others.split(",")
    settings = TransportBenchSettings(
        chunks_bytes=tuple(one * 1024 for one in _numbers(chunks)),
        stripes=_numbers(stripes),
        curve={"off": (False,), "on": (True,), "both": (False, True)}[curve],
        net=tuple(net.split(",")) if net else (),
        congestion=congestion,
        down=down,
        others=tuple(name for name in wanted if name not in absent),
        rounds=rounds,
        warm_s=warm,
        measure_s=seconds,
    )

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    rows = []
    for row in run(settings, progress, ALL):
        if row["row"] == "machine":
            row["not_installed"] = [name for name in wanted if name in absent]
        rows.append(row)
        if as_json:
            click.echo(json.dumps(row))
    if save is not None:
        with save.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if not as_json:
        click.echo(transport_tables(rows, markdown=markdown))


if __name__ == "__main__":
    main()

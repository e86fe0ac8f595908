"""`fsl-node bench`: measurements that users can repeat on their own machines."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands.options import Finite, Whole
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PATHS = ("auto", "avx512", "avx2", "scalar", "numpy")
FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")


@click.group("bench")
def command() -> None:
    """Measure what this machine does; see docs/BENCHMARKS.md for how to read it.

    Every benchmark takes --json: one JSON object for each row.
    """


@command.command("codec")
@click.option(
    "--megabytes", default=128.0, show_default=True, type=Finite(0.1, 16384),
    help="Size of each tensor in fp32. Below the size of the caches, speeds mean little.",
)  # fmt: skip
@click.option("--repeats", default=7, show_default=True, type=Whole(1, 1000))
@click.option(
    "--patience", "patience_s", default=0.0, show_default=True, type=Finite(0, 3600),
    metavar="SECONDS",
    help="For each row, wait so long for rounds in which no neighbor disturbs the core.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="A first look: 32 MB and three repeats.")
@click.option(
    "--tensors", "files", multiple=True, metavar="FILE.safetensors",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measure this file's tensors too; repeatable.",
)  # fmt: skip
@click.option(
    "--path", default="auto", show_default=True, type=click.Choice(PATHS),
    help="Which of the codec's implementations.",
)  # fmt: skip
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(FORMATS),
    help="Measure this format only; repeatable. Otherwise all.",
)  # fmt: skip
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE",
    help="Also write the rows to this file, one JSON object a line.",
)  # fmt: skip
@click.option("--markdown", is_flag=True, help="Tables for a document.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
def codec(
    *,
    megabytes: float,
    repeats: int,
    patience_s: float,
    quick: bool,
    files: tuple[Path, ...],
    path: str,
    formats: tuple[str, ...],
    save: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Measure the codec: speed, size and error on tensors of a training of seconds.

    The training comes first. Beside each speed stand the limits of this machine's memory, measured
    in turns in the same run: one core, then several threads.
    """
    from fsl_async.tools.bench.codec import CodecBenchSettings, run
    from fsl_async.tools.bench.tables import codec_tables

    settings = CodecBenchSettings(
        megabytes=32.0 if quick else megabytes,
        repeats=3 if quick else repeats,
        patience_s=patience_s,
        formats=formats or FORMATS,
        files=files,
        path=path,
    )
    rows = _measured(lambda progress: run(settings, progress), as_json=as_json)
    if save is not None:
        save.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not as_json:
        Output().say(*codec_tables(rows, markdown=markdown).split("\n"))


def _measured(
    run: Callable[[Callable[[str], None]], Iterable[dict[str, Any]]], *, as_json: bool
) -> list[dict[str, Any]]:
    """The rows of a benchmark, which reports its progress on standard error.

    With JSON each row is printed as it comes.
    """
    output, begun = Output(as_json=as_json), time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    rows = []
    for row in run(progress):
        rows.append(row)
        if as_json:
            output.result(row)
    return rows


def _numbers(text: str, what: str, most: int) -> tuple[int, ...]:
    """Comma-separated whole numbers from 1 to `most`; `auto` is 0."""
    try:
        found = tuple(0 if one == "auto" and most <= 64 else int(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or any(not 0 <= one <= most for one in found):
        raise UsageError(f"{what} {text!r}: write numbers up to {most} with commas between")
    return found


@command.command("transport")
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
    help="The interpreter there that has this program.  [default: the path of this one]",
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
@click.option("--down", is_flag=True, help="From the listener to the dialer.")
@click.option("--congestion", default="cubic", show_default=True, help="Of both sites, with --net.")
@click.option("--rounds", default=3, show_default=True, type=Whole(1, 100))
@click.option(
    "--seconds", default=2.0, show_default=True, type=Finite(0.2, 600),
    help="Measured of each transfer.",
)  # fmt: skip
@click.option("--warm", default=0.5, show_default=True, type=Finite(0, 600), help="Seconds before.")
@click.option(
    "--others", default="tcp", show_default=True,
    help="What to measure beside: tcp, a plain stream; none: nothing.",
)  # fmt: skip
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE",
    help="Also add the rows to this file, one JSON object a line.",
)  # fmt: skip
@click.option("--markdown", is_flag=True, help="Tables for a document.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
def transport(
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

    Both are measured in turns in the same run. "control ms" is the longest that a control message
    took while the chunks were under way.
    """
    from fsl_async.tools.bench.tables import transport_tables
    from fsl_async.tools.bench.transport import TransportBenchSettings, run

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
    rows = _measured(lambda progress: run(settings, progress), as_json=as_json)
    if save is not None:
        with save.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if not as_json:
        Output().say(*transport_tables(rows, markdown=markdown).split("\n"))

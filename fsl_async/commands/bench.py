"""`fsl-node bench`: measurements that users can repeat on their own machines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from fsl_async.commands.output import Output

PATHS = ("auto", "avx512", "avx2", "scalar", "numpy")


@click.group("bench")
def command() -> None:
    """Measure what this machine does; see docs/BENCHMARKS.md for how to read it.

    Every benchmark takes --json: one JSON object for each row.
    """


@command.command("codec")
@click.option(
    "--megabytes", default=128.0, show_default=True, type=click.FloatRange(0.1, 16384),
    help="Size of each tensor in fp32. Below the size of the caches, speeds mean little.",
)  # fmt: skip
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1, 1000))
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
    "--peers/--no-peers", default=True, show_default=True, help="Measure zstd and zipnn as well."
)
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
    quick: bool,
    files: tuple[Path, ...],
    path: str,
    peers: bool,
    save: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Measure the codec: speed, size and error on tensors of a training of seconds, which this command does first.

    Beside each speed stand the limits of this machine's memory and what zstd and zipnn do, measured in turns in the same run. The last
    table compares with the targets of the codec.
    """
    from fsl_async.bench.codec import CodecBenchSettings, run
    from fsl_async.bench.codec_table import tables

    settings = CodecBenchSettings(
        megabytes=32.0 if quick else megabytes,
        repeats=3 if quick else repeats,
        files=files,
        peers=peers,
        path=path,
    )
    output = Output(as_json=as_json)
    begun = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    rows = []
    for row in run(settings, progress):
        rows.append(row)
        if as_json:
            output.result(row)
    if save is not None:
        save.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not as_json:
        output.say(tables(rows, markdown=markdown))

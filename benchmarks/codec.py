"""The codec beside others, and against its targets: `fsl-node bench codec` and research tables.

    python benchmarks/codec.py [--megabytes 128] [--repeats 7]     a few minutes
    python benchmarks/codec.py --path avx512 --megabytes 104.8576 --repeats 9 --patience 3 \
        --save benchmarks/results/codec.jsonl --markdown           the tables of docs/BENCHMARKS.md

To the rows of the command it adds: the exact entropy of the codes, and whether each decoded value
is torch's cast (codec_exact.py); work in the same pass as coding (codec_fused.py); the entropy
stage alone, beside zstd -1 (codec_stage.py); complete pipelines of others (codec_peers.py); and the
ratios against the targets (codec_summary.py). `pip install 'fsl-async[bench]'` installs the others;
without them their rows report that. `--json` prints a JSON object for each row.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from codec_exact import exact_fields
from codec_fused import fused_rows
from codec_peers import missing, peer_row, pipelines
from codec_stage import stage_rows
from codec_summary import summary
from codec_tables import SECTIONS

from fsl_async.tools.bench.codec import (
    HEADLINE_TENSOR,
    NUMPY,
    CodecBenchSettings,
    machine_row,
    one_torch_thread,
    tensor_benches,
)
from fsl_async.tools.bench.codec_tensors import TrainingSettings
from fsl_async.tools.bench.tables import codec_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsl_async.tools.bench.codec_rows import TensorBench

FUSED_FORMATS = ("e4m3", "uniform")
STAGE_CALLS = 64
"""Calls of the entropy stage in one measurement."""
SMOKE = CodecBenchSettings(
    megabytes=0.5,
    repeats=1,
    limit_s=0.0,
    training=TrainingSettings(
        preset="0.5m", steps_before=2, steps_between=1, steps_of_delta=1, batch=1
    ),
)


def rows_of(
    settings: CodecBenchSettings, *, peers: bool = True, stage_calls: int = STAGE_CALLS
) -> Iterator[dict[str, Any]]:
    """Measure, one row after the other; the summary's rows last."""
    begun = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    rows = []
    with one_torch_thread():
        yield machine_row(settings) | {"not_installed": missing() if peers else []}
        for bench in tensor_benches(settings, progress):
            progress(bench.tensor)
            for row in _tensor_rows(bench, settings, peers=peers, stage_calls=stage_calls):
                rows.append(row)
                yield row
    yield from summary(rows)


def _tensor_rows(
    bench: TensorBench, settings: CodecBenchSettings, *, peers: bool, stage_calls: int
) -> Iterator[dict[str, Any]]:
    for number_format in settings.formats:
        yield bench.row(number_format) | exact_fields(bench.chunks(number_format))
    if bench.tensor == HEADLINE_TENSOR:
        for number_format in FUSED_FORMATS:
            yield from fused_rows(bench, number_format)
    yield from stage_rows(bench, stage_calls, peers=peers)
    if peers:
        for name, make in pipelines().items():
            yield peer_row(bench, name, make)
    if bench.codec.name != NUMPY:
        yield bench.threads_row("e4m3")


@click.command()
@click.option("--megabytes", default=128.0, show_default=True, help="Of each tensor in fp32.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--patience", default=0.0, show_default=True, metavar="SECONDS")
@click.option("--tensors", "files", multiple=True, metavar="FILE.safetensors", type=Path)
@click.option("--path", default="auto", show_default=True, help="auto avx512 avx2 scalar numpy")
@click.option("--peers/--no-peers", default=True, show_default=True)
@click.option("--save", type=Path, metavar="FILE", help="Also write the rows to this file.")
@click.option("--markdown", is_flag=True, help="Tables for a document.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
@click.option("--smoke", is_flag=True, help="The smallest run, for a test.")
def main(
    *,
    megabytes: float,
    repeats: int,
    patience: float,
    files: tuple[Path, ...],
    path: str,
    peers: bool,
    save: Path | None,
    markdown: bool,
    as_json: bool,
    smoke: bool,
) -> None:
    """Measure the codec beside others and against its targets."""
    settings = CodecBenchSettings(
        megabytes=megabytes, repeats=repeats, patience_s=patience, files=files, path=path
    )
    rows = []
    for row in rows_of(SMOKE, stage_calls=1) if smoke else rows_of(settings, peers=peers):
        rows.append(row)
        if as_json:
            click.echo(json.dumps(row))
    if save is not None:
        save.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not as_json:
        click.echo(codec_tables(rows, SECTIONS, markdown=markdown))


if __name__ == "__main__":
    main()

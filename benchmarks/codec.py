"""The codec on tensors of a short training, beside the machine's limits: `fsl-node bench codec`.

    python benchmarks/codec.py [--megabytes 128] [--repeats 7]     a few minutes
    python benchmarks/codec.py --full --path avx512 --megabytes 104.8576 --repeats 9 --patience 3 \
        --save benchmarks/results/codec.jsonl --markdown           the tables of docs/BENCHMARKS.md

`--full` adds the exact entropy of the codes, and whether each decoded value is torch's cast
(codec_exact.py); work in the same pass as coding (codec_fused.py); the entropy stage alone, beside
zstd -1 (codec_stage.py); complete pipelines of others (codec_peers.py); and the ratios against the
targets (codec_summary.py). `pip install 'fsl-async[bench]'` installs the others; without them their
rows report that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from codec_bench import (
    HEADLINE_TENSOR,
    NUMPY,
    CodecBenchSettings,
    machine_row,
    one_torch_thread,
    tensor_benches,
)
from codec_exact import exact_fields
from codec_fused import fused_rows
from codec_peers import missing, peer_row, pipelines
from codec_rows import FORMATS
from codec_stage import stage_rows
from codec_summary import summary
from codec_tables import codec_tables
from codec_tensors import TrainingSettings
from row_tables import measured, output_options

from fsl_async.commands.options import Finite, Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from codec_rows import TensorBench

PATHS = ("auto", "avx512", "avx2", "scalar", "numpy")
FUSED_FORMATS = ("e4m3", "uniform")
STAGE_CALLS = 64
SMOKE = CodecBenchSettings(
    megabytes=0.5,
    repeats=1,
    limit_s=0.0,
    training=TrainingSettings(
        preset="0.5m", steps_before=2, steps_between=1, steps_of_delta=1, batch=1
    ),
)


def rows_of(
    settings: CodecBenchSettings,
    progress: Callable[[str], None],
    *,
    stage_calls: int = 0,
) -> Iterator[dict[str, Any]]:
    """Measure, one row after the other; the summary's rows last.

    stage_calls: calls of the entropy stage in one measurement; 0: rows of the codec alone.
    """
    rows = []
    with one_torch_thread():
        yield machine_row(settings) | ({"not_installed": missing()} if stage_calls else {})
        for bench in tensor_benches(settings, progress):
            progress(bench.tensor)
            for row in _tensor_rows(bench, settings, stage_calls):
                rows.append(row)
                yield row
    if stage_calls:
        yield from summary(rows)


def _tensor_rows(
    bench: TensorBench, settings: CodecBenchSettings, stage_calls: int
) -> Iterator[dict[str, Any]]:
    for number_format in settings.formats:
        exact = exact_fields(bench.chunks(number_format)) if stage_calls else {}
        yield bench.row(number_format) | exact
    if stage_calls:
        if bench.tensor == HEADLINE_TENSOR:
            for number_format in FUSED_FORMATS:
                yield from fused_rows(bench, number_format)
        yield from stage_rows(bench, stage_calls)
        for name, make in pipelines().items():
            yield peer_row(bench, name, make)
    if bench.codec.name != NUMPY:
        for number_format in ("e4m3",) if stage_calls else settings.formats:
            yield bench.threads_row(number_format)


@click.command("codec")
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
@click.option("--full", is_flag=True, help="Also entropy, fused passes, other programs, targets.")
@click.option("--smoke", is_flag=True, help="The smallest run, for a test.")
@output_options
def main(
    *,
    megabytes: float,
    repeats: int,
    patience_s: float,
    quick: bool,
    files: tuple[Path, ...],
    path: str,
    formats: tuple[str, ...],
    full: bool,
    smoke: bool,
    save: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Measure the codec: speed, size and error on tensors of a training of seconds.

    The training comes first. Beside each speed stand the limits of this machine's memory, measured
    in turns in the same run: one core, then several threads.
    """
    settings = CodecBenchSettings(
        megabytes=32.0 if quick else megabytes,
        repeats=3 if quick else repeats,
        patience_s=patience_s,
        formats=formats or FORMATS,
        files=files,
        path=path,
    )
    calls = (1 if smoke else STAGE_CALLS) if full else 0
    run = partial(rows_of, SMOKE if smoke else settings, stage_calls=calls)
    rows = measured(run, save, "w", as_json=as_json)
    if not as_json:
        click.echo(codec_tables(rows, markdown=markdown))


if __name__ == "__main__":
    main()

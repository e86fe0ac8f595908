"""The codec on tensors of a short training, beside the machine's limits: `fsl-node bench codec`.

    python benchmarks/codec.py [--megabytes 128] [--repeats 7]     a few minutes
    python benchmarks/codec.py --full --path avx512 --megabytes 104.8576 --repeats 9 --patience 3 \
        --save benchmarks/results/codec.jsonl --markdown           the tables of docs/BENCHMARKS.md

`--full` adds the exact entropy of the codes, and whether each decoded value is torch's cast
(codec_stage.py); work in the same pass as coding (codec_fused.py); the entropy stage alone, beside
zstd -1 (codec_stage.py); complete pipelines of others (codec_peers.py); and the ratios against the
targets (codec_tables.py). `pip install 'fsl-async[bench]'` installs the others; without them their
rows report that.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from attrs import field, frozen
from codec_fused import fused_rows
from codec_peers import missing, peer_row, pipelines
from codec_rows import CHUNK_VALUES, FORMATS, HEADLINE_TENSOR, NUMPY, TensorBench
from codec_stage import exact_fields, stage_rows
from codec_tables import codec_tables, summary
from codec_tensors import TrainingSettings, read_values, spread_out, trained_tensors
from codec_timing import MemoryLimits, core_probe, in_turns
from row_tables import measured, output_options

from fsl_async.commands.options import Finite, Whole
from fsl_async.errors import UsageError
from fsl_codecs import CodecUsageError, new_vector
from fsl_codecs.dispatch import Implementation, choice, implementation_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATHS = ("auto", "avx512", "avx2", "scalar", "numpy")
FUSED_FORMATS = ("e4m3", "uniform")
STAGE_CALLS = 64


@frozen
class CodecBenchSettings:
    """Settings of the measurement.

    `repeats` rounds of everything that stands in one row, fewer when they would take longer than
    `limit_s`; for `patience_s` more it looks for rounds that no neighbor on the core disturbs.
    """

    megabytes: float = 128.0
    repeats: int = 7
    limit_s: float = 10.0
    patience_s: float = 0.0
    formats: tuple[str, ...] = FORMATS
    files: tuple[Path, ...] = ()
    path: str = "auto"
    training: TrainingSettings = field(factory=TrainingSettings)

    @property
    def values(self) -> int:
        """Length of the vectors: whole chunks."""
        return max(1, round(self.megabytes * 1e6 / 4 / CHUNK_VALUES)) * CHUNK_VALUES


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute with one thread meanwhile."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)


def machine_row(settings: CodecBenchSettings) -> dict[str, Any]:
    """The first row: what is measured, and where. Raises UsageError for a path that is not here."""
    return {
        "bench": "codec",
        "row": "machine",
        "implementation": _codec(settings.path).name,
        "megabytes": round(settings.values * 4 / 1e6, 1),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def tensor_benches(
    settings: CodecBenchSettings, progress: Callable[[str], None]
) -> Iterator[TensorBench]:
    """Train for tensors, and give a bench for each of them and for each file.

    Raises UsageError for a file that cannot be read, before the training.
    """
    codec = _codec(settings.path)
    files = {file.name: read_values(file, settings.values) for file in settings.files}
    progress("training for tensors")
    tensors = trained_tensors(settings.values, settings.training, progress)
    for name, found in files.items():
        tensors[name] = spread_out(found, settings.values)
    limits = MemoryLimits(settings.values)
    outputs = (new_vector(settings.values), new_vector(settings.values))
    measure = partial(
        in_turns,
        repeats=settings.repeats,
        limit_s=settings.limit_s,
        probe=core_probe(),
        patience_s=settings.patience_s,
    )
    for tensor in sorted(tensors, key=lambda name: name != HEADLINE_TENSOR):
        yield TensorBench(tensor, tensors[tensor], outputs, limits, codec, measure=measure)


def _codec(path: str) -> Implementation:
    if path == "auto":
        return choice().chosen
    try:
        return implementation_named(path)
    except CodecUsageError as error:
        raise UsageError(f"--path {path}: {error}") from None


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

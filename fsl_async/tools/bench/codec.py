"""`fsl-node bench codec`: the codec on tensors of a short training, beside the machine's limits and beside peers."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import field, frozen

from fsl_async.errors import UsageError
from fsl_async.tools.bench import codec_peers
from fsl_async.tools.bench.codec_exact import expected
from fsl_async.tools.bench.codec_files import read_values
from fsl_async.tools.bench.codec_rows import FORMATS, TensorBench
from fsl_async.tools.bench.codec_stage import NUMPY, StageComparison
from fsl_async.tools.bench.codec_summary import HEADLINE_TENSOR, summary
from fsl_async.tools.bench.codec_tensors import TrainingSettings, spread_out, trained_tensors
from fsl_async.tools.bench.limits import MemoryLimits, core_probe
from fsl_async.tools.bench.timing import in_turns
from fsl_codecs import CodecSpec, CodecUsageError, new_vector
from fsl_codecs.dispatch import Implementation, choice, implementation_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from fsl_async.tools.bench.codec_rows import Measure

    Vector = NDArray[np.float32]

STAGE_FORMATS = ("e4m3", "e5m2", "uniform")
FUSED_FORMATS = ("e4m3", "uniform")
_CHUNK_VALUES = 131072


@frozen
class CodecBenchSettings:
    """What to measure.

    `repeats` rounds of everything that stands in one row, fewer when they would take longer than `limit_s`; for `patience_s` more it looks for
    rounds that no neighbour on the core disturbs. `stage_calls` calls of the entropy stage make one measurement of it.
    """

    megabytes: float = 128.0
    repeats: int = 7
    limit_s: float = 10.0
    patience_s: float = 0.0
    stage_calls: int = 64
    files: tuple[Path, ...] = ()
    peers: bool = True
    path: str = "auto"
    training: TrainingSettings = field(factory=TrainingSettings)

    @property
    def values(self) -> int:
        """Length of the vectors: whole chunks."""
        return max(1, round(self.megabytes * 1e6 / 4 / _CHUNK_VALUES)) * _CHUNK_VALUES


def run(settings: CodecBenchSettings, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure, one row after the other; the summary's rows last. torch computes with one thread meanwhile."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for row in _measured(settings, progress):
            rows.append(row)
            yield row
        yield from summary(rows)
    finally:
        torch.set_num_threads(threads_before)


def _codec(path: str) -> Implementation:
    if path == "auto":
        return choice().chosen
    try:
        return implementation_named(path)
    except CodecUsageError as error:
        raise UsageError(f"--path {path}: {error}") from None


def _measured(
    settings: CodecBenchSettings, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    codec = _codec(settings.path)
    path = codec.name
    yield {
        "bench": "codec",
        "row": "machine",
        "implementation": path,
        "megabytes": round(settings.values * 4 / 1e6, 1),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "not_installed": codec_peers.missing() if settings.peers else [],
    }
    files = {file.name: read_values(file, settings.values) for file in settings.files}
    progress("training for tensors")
    tensors = trained_tensors(settings.values, settings.training, progress)
    for name, found in files.items():
        tensors[name] = spread_out(found, settings.values)
    limits = MemoryLimits(settings.values)
    rooms = (new_vector(settings.values), new_vector(settings.values))
    measure = partial(
        in_turns,
        repeats=settings.repeats,
        limit_s=settings.limit_s,
        probe=core_probe(),
        patience_s=settings.patience_s,
    )
    # The tensor that counts first, so that its rows stand together when a run is cut short.
    for tensor in sorted(tensors, key=lambda name: name != HEADLINE_TENSOR):
        bench = TensorBench(tensor, tensors[tensor], rooms, limits, codec, measure=measure)
        for number_format in FORMATS:
            progress(f"{tensor} as {number_format}")
            yield bench.row(number_format)
        if tensor == HEADLINE_TENSOR:
            for number_format in FUSED_FORMATS:
                progress(f"{tensor} as {number_format}, with what is done in the same pass")
                yield from bench.fused_rows(number_format)
        progress(f"{tensor}: entropy stage")
        yield from _stage_rows(tensor, tensors[tensor], settings, path, measure)
        if settings.peers:
            for name, make in codec_peers.pipelines().items():
                progress(f"{tensor} beside {name}")
                yield bench.peer_row(name, make)
        if path != NUMPY:  # which has one thread
            progress(f"{tensor} on two threads")
            yield bench.threads_row("e4m3")


def _stage_rows(
    tensor: str, values: Vector, settings: CodecBenchSettings, path: str, measure: Measure
) -> Iterator[dict[str, Any]]:
    """The entropy stage on the chunk in the middle of the vector."""
    start = values.size // _CHUNK_VALUES // 2 * _CHUNK_VALUES
    chunk = values[start : start + _CHUNK_VALUES]
    for number_format in STAGE_FORMATS:
        codes = expected(chunk, CodecSpec(format=number_format)).codes.astype(np.uint8)
        comparison = StageComparison(
            codes, number_format, settings.stage_calls, peers=settings.peers
        )
        rounds = measure(comparison.actions())
        for row in comparison.rows(tensor, rounds, path):
            yield row | {
                "core_rate": rounds.core_rate,
                "undisturbed_share": rounds.undisturbed_share,
                "load_1m": round(os.getloadavg()[0], 2),
            }

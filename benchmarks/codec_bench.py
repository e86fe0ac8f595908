"""Settings of benchmarks/codec.py, and the bench of each tensor that it measures."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from codec_limits import MemoryLimits, core_probe
from codec_rows import FORMATS, TensorBench
from codec_tensors import TrainingSettings, read_values, spread_out, trained_tensors
from codec_timing import in_turns

from fsl_async.errors import UsageError
from fsl_codecs import CodecUsageError, new_vector
from fsl_codecs.dispatch import Implementation, choice, implementation_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADLINE_TENSOR = "pseudo_gradients"
"""What clients of a pretraining run send; measured first, so that its rows come early."""
CHUNK_VALUES = 131072
NUMPY = "numpy"
"""The path that has one thread only."""


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

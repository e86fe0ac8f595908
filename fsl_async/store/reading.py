"""Reading a version from a run directory, without the store: for evaluation and exports.

A version that is not whole is read from the newest whole one before it and the coded changes, by
the addition that every client makes. The store may be running: it removes old versions meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from fsl_async.store.checkpoint import MEAN, UPDATE, WEIGHTS, open_flat
from fsl_async.store.digest import check_chunk
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.frame_file import each_frame
from fsl_async.store.outer import add_to_mean
from fsl_async.store.seed_step import keys_of
from fsl_codecs import add_signs, decode_accumulate, decode_into

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.checkpoint import Checkpoint, Checkpoints
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import VersionRecord


@frozen
class ReadVersion:
    """A version's vectors: float32, (manifest.values,). mean: None where none is kept."""

    record: VersionRecord
    weights: NDArray[np.float32]
    mean: NDArray[np.float32] | None


def read_version(
    files: Files, checkpoints: Checkpoints, version: int, manifest: Manifest
) -> ReadVersion:
    """Read a version, and check all of it. Raises Damage, OSError."""
    try:
        return _read(files, checkpoints, version, manifest)
    except (Damage, FileNotFoundError):
        # It may have become whole meanwhile, and the version that it was to be made from removed.
        return _read(files, checkpoints, version, manifest)


def _read(files: Files, checkpoints: Checkpoints, version: int, manifest: Manifest) -> ReadVersion:
    later = [checkpoints.load(version)]
    while not later[0].is_whole:
        later.insert(0, checkpoints.load(later[0].record.version - 1))
    base = later.pop(0)
    weights = _read_vector(files, base, WEIGHTS, manifest)
    assert weights is not None, "it is whole"
    mean, record = _read_vector(files, base, MEAN, manifest), base.record
    for checkpoint in later:
        record = checkpoint.record
        if not record.mean_share:
            mean = None
        elif mean is None:
            mean = weights.copy()
        _add_change(files, checkpoint, weights, manifest)
        if mean is not None:
            for index in range(manifest.chunks):
                part = slice(*manifest.chunk_range(index))
                if manifest.is_buffer(index):
                    mean[part] = weights[part]
                else:
                    add_to_mean(mean[part], weights[part], record.mean_share)
    return ReadVersion(record, weights, mean)


def _add_change(
    files: Files, checkpoint: Checkpoint, weights: NDArray[np.float32], manifest: Manifest
) -> None:
    if checkpoint.record.seeds is not None:
        add_signs(weights, 0, *keys_of([checkpoint.record.seeds]))
        return
    path: Path = checkpoint.path / UPDATE
    if UPDATE not in checkpoint.files:
        raise Damage(UPDATE, "is missing")
    try:
        for index, frame in enumerate(each_frame(files, path, manifest.chunks)):
            check_chunk(UPDATE, checkpoint.files[UPDATE].checks, index, frame)
            chunk = weights[slice(*manifest.chunk_range(index))]
            if manifest.is_buffer(index):
                decode_into(frame, chunk)
            else:
                decode_accumulate(frame, chunk, 1.0)  # times one is exact
    except StoreError:
        raise Damage(UPDATE, "holds an incomplete frame") from None


def _read_vector(
    files: Files, checkpoint: Checkpoint, name: str, manifest: Manifest
) -> NDArray[np.float32] | None:
    """Read a vector that the version has on disk; None where it has none."""
    reader = open_flat(files, checkpoint, name, manifest)
    if reader is None:
        return None
    vector = np.empty(manifest.values, np.float32)
    try:
        for index in range(manifest.chunks):
            start, stop = manifest.chunk_range(index)
            reader.read_into(index, vector[start:stop])
    finally:
        reader.close()
    return vector

"""Reading a version from a run directory, without the store: for evaluation and exports.

A version that is not whole is read from the newest whole one before it and the coded changes. The
store may be running: it removes old versions meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from fsl_async.store.deltas.seed_step import keys_of
from fsl_async.store.disk.chunk_files import check_chunk, each_frame
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.rules.outer import Average
from fsl_async.store.settings import StoreSettings
from fsl_async.store.vectors.vectors import LOSSLESS, Vectors
from fsl_async.store.versions.checkpoint import MEAN, UPDATE, WEIGHTS
from fsl_codecs import add_signs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsl_async.files.files import Files
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.vectors.vectors import Vector
    from fsl_async.store.versions.checkpoint import Checkpoint, Checkpoints


@frozen
class ReadVersion:
    """A version's vectors: float32, (manifest.values,). mean: None where none is kept."""

    record: VersionRecord
    weights: Vector
    mean: Vector | None


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
    # With the weights and their mean alone.
    settings = StoreSettings(outer=Average(), codec_down=LOSSLESS)
    vectors = Vectors(manifest, settings, ChunkPool())
    vectors.load(files, later[0])
    for checkpoint in later[1:]:
        record = checkpoint.record
        if record.seeds is not None:
            add_signs(vectors.named[WEIGHTS], 0, *keys_of([record.seeds]))
        else:
            frames = _frames(files, checkpoint, manifest)
            vectors.follow(record.version, frames, record.mean_share)
    return ReadVersion(later[-1].record, vectors.named[WEIGHTS], vectors.named.get(MEAN))


def _frames(files: Files, checkpoint: Checkpoint, manifest: Manifest) -> Iterator[bytes]:
    """Yield the frames of a version's coded change, checked."""
    if UPDATE not in checkpoint.files:
        raise Damage(UPDATE, "is missing")
    try:
        path, checks = checkpoint.path / UPDATE, checkpoint.files[UPDATE].checks
        for index, frame in enumerate(each_frame(files, path, manifest.chunks)):
            check_chunk(UPDATE, checks, index, frame)
            yield frame
    except StoreError:
        raise Damage(UPDATE, "holds an incomplete frame") from None

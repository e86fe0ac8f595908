"""Advance: the streaming outer step, from one version's files and the accumulator to the next version's files.

Chunk by chunk: read weights, momentum and residual of the current version; take the same chunk of the average; compute
(fsl_async.learn.outer); write the next version's three vectors and the coded update. Besides the accumulator this needs a
handful of chunks (about 5 MiB), whatever the model's size.

Of whole weights (docs/adr/0045) there is no update to code: clients fetch such a version in full.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from fsl_async.learn.checkpoint import MOMENTUM, RESIDUAL, UPDATE, WEIGHTS, open_flat
from fsl_async.learn.errors import StoreError
from fsl_async.learn.manifest import CHUNK_VALUES, DIGEST_CHARACTERS
from fsl_async.learn.outer import (
    apply_change,
    average_whole,
    desired_change,
    lost_in_coding,
    squared_norm,
)
from fsl_codecs import bound, decode_into, encode_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from fsl_async.learn.checkpoint import Checkpoint, StoredFile, VersionWriter
    from fsl_async.learn.files import Files
    from fsl_async.learn.flat_file import FlatReader
    from fsl_async.learn.manifest import Manifest
    from fsl_async.learn.records import StoreSettings


@frozen
class Advanced:
    """The next version's files are written and durable, under a temporary name."""

    stored: Mapping[str, StoredFile]
    digest: str
    update_bytes: int
    """Of the coded frames alone, as they travel to one client; 0 where there is no update."""
    update_norm: float


def advance(
    files: Files,
    manifest: Manifest,
    current: Checkpoint,
    *,
    writer: VersionWriter,
    averages: Iterable[NDArray[np.float32]],
    settings: StoreSettings,
) -> Advanced:
    """Write the version after `current`; `averages`: what the round comes to, chunk by chunk (float32), each looked at once.

    Raises StoreError when the result would not be finite, OSError.
    """
    spec = settings.codec_down
    outer = settings.outer
    with ExitStack() as closing:

        def reader(name: str) -> FlatReader | None:
            found = open_flat(files, current, name, manifest)
            if found is not None:
                closing.callback(found.close)
            return found

        old_weights, old_momentum, old_residual = map(reader, (WEIGHTS, MOMENTUM, RESIDUAL))
        assert old_weights is not None, "a verified checkpoint has weights"
        new_weights = writer.flat(WEIGHTS)
        new_momentum = writer.flat(MOMENTUM) if outer.has_momentum else None
        # fp32 frames lose nothing, so nothing is ever owed.
        new_residual = writer.flat(RESIDUAL) if spec.format != "fp32" else None
        update = writer.frames(UPDATE)

        longest = min(CHUNK_VALUES, manifest.values)
        buffers = [np.zeros(longest, dtype=np.float32) for _ in range(5)]
        coded = memoryview(bytearray(bound(longest, spec)))
        update_bytes = 0
        norm_squared = 0.0
        for index, average in zip(range(manifest.chunks), averages, strict=True):
            start, stop = manifest.chunk_range(index)
            weights, momentum, residual, change, sent = (b[: stop - start] for b in buffers)
            old_weights.read_into(index, weights)
            if old_momentum is not None and new_momentum is not None:
                old_momentum.read_into(index, momentum)
            elif new_momentum is not None:
                momentum.fill(0.0)
            if old_residual is not None:
                old_residual.read_into(index, residual)
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(change, average)
                desired_change(change, momentum, residual, outer)
                frame = coded[: encode_into(change, coded, spec)]
                decode_into(frame, sent)
                apply_change(weights, sent)
                lost_in_coding(change, sent)
            norm_squared += squared_norm(sent)
            _check_finite(manifest, start, norm_squared, weights)
            new_weights.append(weights)
            if new_momentum is not None:
                new_momentum.append(momentum)
            if new_residual is not None:
                new_residual.append(change)
            update.append(frame)
            update_bytes += len(frame)
        stored = writer.seal()
    digest = stored[WEIGHTS].sha256[:DIGEST_CHARACTERS]
    return Advanced(stored, digest, update_bytes, math.sqrt(norm_squared))


def scaled(
    manifest: Manifest, accumulator: NDArray[np.float32], scale: float
) -> Iterator[NDArray[np.float32]]:
    """The accumulator times `scale`, chunk by chunk; one fp32 multiplication."""
    room = np.empty(min(CHUNK_VALUES, manifest.values), np.float32)
    for index in range(manifest.chunks):
        start, stop = manifest.chunk_range(index)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(accumulator[start:stop], np.float32(scale), out=room[: stop - start])
        yield room[: stop - start]


def advance_whole(
    files: Files,
    manifest: Manifest,
    current: Checkpoint,
    *,
    writer: VersionWriter,
    accumulator: NDArray[np.float64],
    member_weight: float,
    scale: float,
) -> Advanced:
    """The same for a run whose deltas are whole weights; `accumulator` is float64, `member_weight` what its weights sum up to.

    Raises StoreError when the result would not be finite, OSError.
    """
    with ExitStack() as closing:
        old = open_flat(files, current, WEIGHTS, manifest)
        assert old is not None, "a verified checkpoint has weights"
        closing.callback(old.close)
        new = writer.flat(WEIGHTS)
        longest = min(CHUNK_VALUES, manifest.values)
        before, room = np.zeros(longest, np.float32), np.zeros(longest, np.float32)
        norm_squared = 0.0
        for index in range(manifest.chunks):
            start, stop = manifest.chunk_range(index)
            weights, change = room[: stop - start], before[: stop - start]
            old.read_into(index, weights)
            change[:] = weights
            with np.errstate(over="ignore", invalid="ignore"):
                average_whole(accumulator[start:stop], weights, member_weight, scale)
                np.subtract(weights, change, out=change)
            norm_squared += squared_norm(change)
            _check_finite(manifest, start, norm_squared, weights)
            new.append(weights)
        stored = writer.seal()
    digest = stored[WEIGHTS].sha256[:DIGEST_CHARACTERS]
    return Advanced(stored, digest, 0, math.sqrt(norm_squared))


def _check_finite(
    manifest: Manifest, start: int, norm_squared: float, weights: NDArray[np.float32]
) -> None:
    if not math.isfinite(norm_squared) or not np.isfinite(weights).all():
        raise StoreError(
            f"the outer step is not finite in tensor {manifest.tensor_at(start)!r} or after it; "
            f"quarantine the delta with the largest norm, or lower the outer learning rate"
        )

"""Advance: the streaming outer step, from one version's files and the average to the next version.

For each chunk: read weights, momentum and residual of the current version, take the same chunk of
the average, compute (fsl_async.store.outer), and write the next version's three vectors and the
coded update. Besides the accumulator this needs a few chunks (about 7 MiB) for any model size.
Writing and hashing take longer than computing, and the four files are independent: the decoding
threads write them while the next chunk is computed (docs/adr/0093). A version of full weights is
one file, written in the caller's thread.

Full weights (docs/adr/0045) have no coded update: clients fetch such a version in full.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from fsl_async.store.checkpoint import (
    MEAN,
    MOMENTUM,
    RESIDUAL,
    UPDATE,
    WEIGHTS,
    open_flat,
)
from fsl_async.store.digest import DIGEST_CHARACTERS
from fsl_async.store.outer import (
    OuterStep,
    add_to_mean,
    apply_change,
    average_full,
    check_finite,
    desired_change,
    lost_in_coding,
    replace_buffers,
    squared_norm,
)
from fsl_async.store.seed_step import keys_of
from fsl_codecs import CodecSpec, add_signs, bound, decode_into, encode, encode_into, new_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.checkpoint import Checkpoint, StoredFile, VersionWriter
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.flat_file import FlatReader
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import StoreSettings
    from fsl_async.store.seed_step import SeedStep


LOSSLESS = CodecSpec(format="fp32")
"""How buffers are coded."""


@frozen
class Advanced:
    """The next version's files, durable under a temporary name."""

    stored: Mapping[str, StoredFile]
    digest: str
    update_bytes: int
    """Bytes of the coded frames, as sent to one client; 0 when there is no update."""
    update_norm: float
    average_norm: float = 0.0
    """L2 norm of the round's average; 0 for full weights."""


class _Buffers:
    """Buffers for one chunk of the next version.

    vectors: weights, momentum, change and mean, float32. coded: the coded change.
    """

    def __init__(self, values: int, coded_bytes: int) -> None:
        self.vectors = [new_vector(values) for _ in range(4)]
        self.coded = memoryview(bytearray(coded_bytes))


class _OuterStep:
    """The open files of the current and the next version, and the outer step on one chunk."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        current: Checkpoint,
        *,
        writer: VersionWriter,
        settings: StoreSettings,
        step: OuterStep,
        mean_share: float,
        closing: ExitStack,
    ) -> None:
        def reader(name: str) -> FlatReader | None:
            found = open_flat(files, current, name, manifest)
            if found is not None:
                closing.callback(found.close)
            return found

        self._manifest = manifest
        self._spec, self._step = settings.codec_down, step
        self._keeps_momentum = settings.outer.has_momentum
        self._old_weights, self._old_momentum, self._old_residual = map(
            reader, (WEIGHTS, MOMENTUM, RESIDUAL)
        )
        self._new_weights = writer.flat(WEIGHTS)
        self._new_momentum = writer.flat(MOMENTUM) if self._keeps_momentum else None
        # fp32 frames are lossless, so the residual stays zero.
        self._new_residual = writer.flat(RESIDUAL) if self._spec.format != "fp32" else None
        self._mean_share = mean_share
        self._old_mean = reader(MEAN)
        self._new_mean = writer.flat(MEAN) if mean_share else None
        self._update = writer.frames(UPDATE)
        self._residual, self._sent = new_vector(self.longest), new_vector(self.longest)
        self.update_bytes = 0
        self.norm_squared = 0.0
        self.average_squared = 0.0

    @property
    def longest(self) -> int:
        """Number of values in the longest chunk."""
        return self._manifest.longest_chunk

    def buffers(self) -> _Buffers:
        """Allocate the buffers for one chunk."""
        return _Buffers(self.longest, bound(self.longest, self._spec))

    def compute(
        self, index: int, average: NDArray[np.float32], buffer: _Buffers
    ) -> list[Callable[[], None]]:
        """Compute a chunk of the next version in `buffer`; return the writes, one per file."""
        start, stop = self._manifest.chunk_range(index)
        weights, momentum, change, mean = (vector[: stop - start] for vector in buffer.vectors)
        residual, sent = self._residual[: stop - start], self._sent[: stop - start]
        assert self._old_weights is not None, "a verified checkpoint has weights"
        self._old_weights.read_into(index, weights)
        if self._manifest.is_buffer(index):
            return self._replace(index, average, buffer)
        if self._new_momentum is not None and self._old_momentum is not None:
            self._old_momentum.read_into(index, momentum)
        elif self._new_momentum is not None:
            momentum.fill(0.0)
        if self._old_residual is not None:
            self._old_residual.read_into(index, residual)
        if self._new_mean is not None and self._old_mean is not None:
            self._old_mean.read_into(index, mean)
        elif self._new_mean is not None:
            np.copyto(mean, weights)
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(change, average)
            desired_change(
                change,
                momentum,
                residual,
                self._step,
                keeps_momentum=self._keeps_momentum,
            )
            frame = buffer.coded[: encode_into(change, buffer.coded, self._spec)]
            decode_into(frame, sent)
            apply_change(weights, sent)
            lost_in_coding(change, sent)
            if self._new_mean is not None:
                add_to_mean(mean, weights, self._mean_share)
        self.average_squared += squared_norm(average)
        self.norm_squared += squared_norm(sent)
        self.update_bytes += len(frame)
        check_finite(self._manifest, index, self.norm_squared, weights)
        return self._writes(frame, [weights, momentum, change, mean])

    def _replace(
        self, index: int, average: NDArray[np.float32], buffer: _Buffers
    ) -> list[Callable[[], None]]:
        """Compute a chunk of buffers: their average, sent as it is. See `compute`."""
        vectors = [vector[: self._manifest.chunk_values(index)] for vector in buffer.vectors]
        values, *others = vectors
        replace_buffers(values, average)
        check_finite(self._manifest, index, 0.0, values)
        for vector in others:
            vector.fill(0.0)
        np.copyto(vectors[3], values)
        frame = memoryview(encode(values, LOSSLESS))
        self.update_bytes += len(frame)
        return self._writes(frame, vectors)

    def _writes(
        self, frame: memoryview, vectors: Sequence[NDArray[np.float32]]
    ) -> list[Callable[[], None]]:
        """The writes of a chunk, one per file. vectors: in the order of `_Buffers`."""
        writes: list[Callable[[], None]] = [partial(self._update.append, frame)]
        files = (self._new_weights, self._new_momentum, self._new_residual, self._new_mean)
        return writes + [
            partial(file.append, vector)
            for file, vector in zip(files, vectors, strict=True)
            if file is not None
        ]


def advance(
    files: Files,
    manifest: Manifest,
    current: Checkpoint,
    *,
    writer: VersionWriter,
    averages: Iterable[NDArray[np.float32]],
    settings: StoreSettings,
    step: OuterStep,
    mean_share: float = 0.0,
    pool: ChunkPool,
) -> Advanced:
    """Write the version after `current`.

    averages: the round's average, chunk by chunk (float32), each read once. step: the numbers of
    the outer step. mean_share: how far the mean of versions moves; 0: none is kept.

    Raises StoreError when the result is not finite, Damage when a file of `current` was altered,
    OSError.
    """
    with ExitStack() as closing:
        outer = _OuterStep(
            files,
            manifest,
            current,
            writer=writer,
            settings=settings,
            step=step,
            mean_share=mean_share,
            closing=closing,
        )
        # One chunk is written and hashed while the next one is computed.
        buffers = outer.buffers(), outer.buffers()
        wait_for_writes = pool.begin([])
        try:
            for index, average in zip(range(manifest.chunks), averages, strict=True):
                writes = outer.compute(index, average, buffers[index % 2])
                # A chunk's writes begin when those of the chunk before have ended, so that each
                # file receives its chunks in order.
                wait_for_writes()
                wait_for_writes = pool.begin(writes)
        except BaseException:
            # The first error counts, but no thread may write to files that are closed next.
            with suppress(Exception):
                wait_for_writes()
            raise
        wait_for_writes()
        stored = writer.seal(pool)
    digest = stored[WEIGHTS].digest[:DIGEST_CHARACTERS]
    norms = math.sqrt(outer.norm_squared), math.sqrt(outer.average_squared)
    return Advanced(stored, digest, outer.update_bytes, *norms)


def averaged(
    manifest: Manifest, sums: Iterable[NDArray[Any]], scale: float, weight: float
) -> Iterator[NDArray[np.float32]]:
    """Yield the average of a round by its sums, chunk by chunk, each valid until the next.

    Of weights: `scale` times the sum, with one fp32 multiplication. Of buffers: their mean, which
    lies between theirs whatever the scale is. weight: the sum of the weights in the sums; where it
    is 0, buffers have no mean, and the chunk is empty.
    """
    buffer = np.empty(manifest.longest_chunk, np.float32)
    for index, total in enumerate(sums):
        part = buffer[: len(total)]
        with np.errstate(over="ignore", invalid="ignore"):
            if not manifest.is_buffer(index):
                np.multiply(total, np.float32(scale), out=part)
            elif weight:
                np.divide(total, weight, out=part, casting="same_kind")
            else:
                part = buffer[:0]
        yield part


def advance_full(
    files: Files,
    manifest: Manifest,
    current: Checkpoint,
    *,
    writer: VersionWriter,
    sums: Iterable[NDArray[np.float64]],
    member_weight: float,
    scale: float,
    pool: ChunkPool,
) -> Advanced:
    """Write the version after `current` for a run whose deltas are full weights.

    sums: weighted sums of the clients' weights, chunk by chunk (float64).
    member_weight: sum of the clients' weights in the average.

    Raises StoreError when the result is not finite, Damage, OSError.
    """
    with ExitStack() as closing:
        old = open_flat(files, current, WEIGHTS, manifest)
        assert old is not None, "a verified checkpoint has weights"
        closing.callback(old.close)
        new = writer.flat(WEIGHTS)
        longest = manifest.longest_chunk
        before, buffer = np.zeros(longest, np.float32), np.zeros(longest, np.float32)
        norm_squared = 0.0
        for index, total in zip(range(manifest.chunks), sums, strict=True):
            start, stop = manifest.chunk_range(index)
            weights, change = buffer[: stop - start], before[: stop - start]
            old.read_into(index, weights)
            change[:] = weights
            with np.errstate(over="ignore", invalid="ignore"):
                average_full(total, weights, member_weight, scale)
                np.subtract(weights, change, out=change)
            norm_squared += squared_norm(change)
            check_finite(manifest, index, norm_squared, weights)
            new.append(weights)
        stored = writer.seal(pool)
    digest = stored[WEIGHTS].digest[:DIGEST_CHARACTERS]
    return Advanced(stored, digest, 0, math.sqrt(norm_squared))


def advance_seeds(
    files: Files,
    manifest: Manifest,
    current: Checkpoint,
    *,
    writer: VersionWriter,
    step: SeedStep,
    pool: ChunkPool,
) -> dict[str, StoredFile]:
    """Write the weights of the version that `step` leads to from `current`.

    Raises StoreError when they are not finite, Damage, OSError.
    """
    keys, steps = keys_of([step])
    old, new = open_flat(files, current, WEIGHTS, manifest), writer.flat(WEIGHTS)
    assert old is not None, "a verified checkpoint has weights"
    buffer = new_vector(manifest.longest_chunk)
    try:
        for index in range(manifest.chunks):
            start, stop = manifest.chunk_range(index)
            weights = buffer[: stop - start]
            old.read_into(index, weights)
            with np.errstate(over="ignore", invalid="ignore"):
                add_signs(weights, start, keys, steps)
            check_finite(manifest, index, 0.0, weights)
            new.append(weights)
    finally:
        old.close()
    return writer.seal(pool)

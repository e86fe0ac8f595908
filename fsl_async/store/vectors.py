"""Vectors: weights, momentum, residual, mean and owed of the newest version, in memory.

A version is made in one pass over them, chunk by chunk, in place, on the threads of a pool:

    advance    computes the coded change, the next vectors and the digest of the weights
    repeat     makes the same bits again from the coded change, after a crash
    replay     does both in a run of zeroth order, from the version's steps along directions

The change becomes durable after the pass. Where that fails, memory is in the state that a process
has lost that died then, and is restored as after a crash (fsl_async.store.resident). The arithmetic
is that of `fsl_async.store.outer`.
"""

from __future__ import annotations

import math
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from attrs import frozen

from fsl_async.store.advance import LOSSLESS
from fsl_async.store.checkpoint import MEAN, MOMENTUM, OWED, RESIDUAL, WEIGHTS, open_flat
from fsl_async.store.digest import DIGEST_CHARACTERS, chunk_digest, digest_of, vector_digest
from fsl_async.store.outer import (
    add_to_mean,
    apply_change,
    check_finite,
    desired_change,
    replace_buffers,
    squared_norm,
)
from fsl_async.store.seed_step import keys_of
from fsl_codecs import add_signs, bound, decode_into, encode, encode_into, new_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.checkpoint import Checkpoint
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.outer import OuterStep
    from fsl_async.store.records import StoreSettings
    from fsl_async.store.seed_step import SeedStep

    Vector = NDArray[np.float32]


T = TypeVar("T")

TOGETHER = 4
"""Chunks that a thread is handed at a time: handing over costs a tenth of a millisecond."""


@frozen
class Change:
    """From one version to the next. digest: of the weights after it, as nodes compare it."""

    digest: str
    update_bytes: int
    update_norm: float
    average_norm: float


@frozen
class _ChunkDone:
    frame: bytes
    digest: bytes
    sent_squared: float
    average_squared: float


class _Scratch:
    """One chunk's memory: the average, which becomes the desired change, and what is sent of it."""

    def __init__(self, values: int, coded_bytes: int) -> None:
        self.average, self.sent, self.room = (new_vector(values) for _ in range(3))
        self.coded = memoryview(bytearray(coded_bytes))


class Vectors:
    """The vectors of version `version`: float32, (manifest.values,); None where zeros."""

    def __init__(self, manifest: Manifest, settings: StoreSettings, pool: ChunkPool) -> None:
        self.version = -1
        self.weights = new_vector(manifest.values)
        self.momentum = new_vector(manifest.values) if settings.outer.has_momentum else None
        # fp32 frames are lossless, and seeds are not coded, so the residual stays zero.
        loses = settings.codec_down.format != "fp32" and not settings.kind.is_scalars
        self.residual = new_vector(manifest.values) if loses else None
        self.owed = new_vector(manifest.values) if settings.keeps_owed else None
        self.mean: Vector | None = None
        self._manifest = manifest
        self._spec = settings.codec_down
        self._pool = pool
        self._scratch: list[_Scratch] = []
        """Unused; at most as many exist as the pool takes chunks at once."""
        self._zeros = new_vector(manifest.longest_chunk if self.residual is None else 0)

    @property
    def named(self) -> dict[str, Vector]:
        """The vectors by the names of their files in a checkpoint, without those that are zeros."""
        named = {
            WEIGHTS: self.weights,
            MOMENTUM: self.momentum,
            RESIDUAL: self.residual,
            OWED: self.owed,
        }
        found = {name: vector for name, vector in named.items() if vector is not None}
        return found if self.mean is None else {**found, MEAN: self.mean}

    def load(self, files: Files, checkpoint: Checkpoint) -> None:
        """Read a checkpoint; a vector that it lacks is zeros. Raises Damage, OSError."""
        self.version = -1
        self.mean = None
        if MEAN in checkpoint.files:
            self.mean = new_vector(self._manifest.values)
        for name, vector in self.named.items():
            reader = open_flat(files, checkpoint, name, self._manifest)
            if reader is None:
                vector.fill(0.0)
                continue
            try:
                for index in range(self._manifest.chunks):
                    reader.read_into(index, self._chunk(vector, index))
            finally:
                reader.close()
        self.version = checkpoint.record.version

    def weights_chunk(self, index: int) -> Vector:
        """The weights of a chunk, which the next version changes. Raises IndexError."""
        return self._chunk(self.weights, index)

    def digest(self) -> str:
        """The digest of the weights, computed."""
        return digest_of(self.weights, self._pool.each, weights=self._manifest.weights)

    def advance(
        self,
        version: int,
        averages: Iterable[Vector],
        step: OuterStep,
        mean_share: float,
        take: Callable[[bytes], object],
    ) -> Change:
        """Make these the vectors of `version`, the next one, in place.

        averages: the round's average, chunk by chunk, each valid until the next; where something is
        owed, (2, values) with what is owed after it. mean_share: how far the mean of versions
        moves; 0: none is kept. take: is called with each frame of the coded change, in order.

        Raises StoreError when the result is not finite, and what `averages` and `take` raise. After
        an error the vectors are of no version: `load` a checkpoint again.
        """
        self.version = -1
        self._set_mean(mean_share)

        def advance_some(jobs: Sequence[tuple[int, _Scratch, int]]) -> list[_ChunkDone]:
            try:
                return [self._advance_chunk(*job, step, mean_share) for job in jobs]
            finally:
                self._scratch += [scratch for _, scratch, _ in jobs]

        digests: list[bytes] = []
        update_bytes, sent_squared, average_squared = 0, 0.0, 0.0
        some = batched(self._in_scratch(averages), TOGETHER)
        for done in chain.from_iterable(self._pool.each(advance_some, some)):
            take(done.frame)
            digests.append(done.digest)
            update_bytes += len(done.frame)
            sent_squared += done.sent_squared
            average_squared += done.average_squared
        assert len(digests) == self._manifest.chunks
        self.version = version
        return Change(
            vector_digest(digests)[:DIGEST_CHARACTERS],
            update_bytes,
            math.sqrt(sent_squared),
            math.sqrt(average_squared),
        )

    def _in_scratch(self, averages: Iterable[Vector]) -> Iterator[tuple[int, _Scratch, int]]:
        """Copy each average into memory that its job may change, and what is owed to its place."""
        for index, rows in enumerate(averages):
            average = rows
            if self.owed is not None:
                average, owed = rows
                np.copyto(self._chunk(self.owed, index), owed)
            if not self._scratch:
                values = self._manifest.longest_chunk
                self._scratch.append(_Scratch(values, bound(values, self._spec)))
            scratch = self._scratch.pop()
            np.copyto(scratch.average[: len(average)], average)
            yield index, scratch, len(average)

    def _advance_chunk(
        self, index: int, scratch: _Scratch, values: int, step: OuterStep, mean_share: float
    ) -> _ChunkDone:
        if self._manifest.is_buffer(index):
            return self._replace_chunk(index, scratch.average[:values])
        average, sent = scratch.average[:values], scratch.sent[:values]
        average_squared = squared_norm(average)
        with np.errstate(over="ignore", invalid="ignore"):
            self._desire(average, index, step, scratch.room[:values])
            frame = bytes(scratch.coded[: encode_into(average, scratch.coded, self._spec)])
            decode_into(frame, sent)
            weights = self._move(index, average, sent, mean_share, scratch.room[:values])
        sent_squared = squared_norm(sent)
        check_finite(self._manifest, index, sent_squared, weights)
        return _ChunkDone(frame, chunk_digest(weights), sent_squared, average_squared)

    def _replace_chunk(self, index: int, average: Vector) -> _ChunkDone:
        """Set a chunk of buffers to their average, which is sent as it is."""
        buffers = self._chunk(self.weights, index)
        replace_buffers(buffers, average, self._chunk_of_mean(index))
        check_finite(self._manifest, index, 0.0, buffers)
        return _ChunkDone(encode(buffers, LOSSLESS), chunk_digest(buffers), 0.0, 0.0)

    def _receive_buffers(self, index: int, frame: bytes) -> None:
        """Set a chunk of buffers to those of a frame."""
        buffers = self._chunk(self.weights, index)
        decode_into(frame, buffers)
        replace_buffers(buffers, buffers[:0], self._chunk_of_mean(index))

    def _chunk_of_mean(self, index: int) -> Vector | None:
        return None if self.mean is None else self._chunk(self.mean, index)

    def repeat(
        self,
        version: int,
        averages: Iterable[Vector],
        frames: Iterable[bytes],
        step: OuterStep,
        mean_share: float,
    ) -> None:
        """Make these the vectors of `version` again, in place.

        frames: of its coded change, in order. See `advance` for the rest.
        """
        self.version = -1
        self._set_mean(mean_share)

        def repeat_chunk(job: tuple[tuple[int, _Scratch, int], bytes]) -> None:
            (index, scratch, values), frame = job
            average, sent = scratch.average[:values], scratch.sent[:values]
            if self._manifest.is_buffer(index):
                self._receive_buffers(index, frame)
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._desire(average, index, step, scratch.room[:values])
                    decode_into(frame, sent)
                    self._move(index, average, sent, mean_share, scratch.room[:values])
            self._scratch.append(scratch)

        self._pool.run(repeat_chunk, zip(self._in_scratch(averages), frames, strict=True))
        self.version = version

    def replay(self, step: SeedStep) -> str:
        """Make these the vectors of the version after `step.round`, in place.

        They have neither momentum nor residual. Returns the digest. Raises StoreError when the
        result is not finite; the vectors are then of no version: `load` a checkpoint again.
        """
        self.version = -1
        keys, steps = keys_of([step])

        def replay_chunk(index: int) -> bytes:
            weights = self._chunk(self.weights, index)
            with np.errstate(over="ignore", invalid="ignore"):
                add_signs(weights, self._manifest.chunk_range(index)[0], keys, steps)
            check_finite(self._manifest, index, 0.0, weights)
            return chunk_digest(weights)

        digests = self._pool.each(replay_chunk, range(self._manifest.chunks))
        digest = vector_digest(digests)[:DIGEST_CHARACTERS]
        self.version = step.round + 1
        return digest

    def follow(
        self, version: int, frames: Iterable[bytes], step: OuterStep, mean_share: float
    ) -> None:
        """Make these the vectors of `version` by its coded change alone.

        The weights are exact. Momentum is what it would be if nothing had been lost in coding, and
        residual and what is owed begin again at zero. See `repeat` for the rest.
        """
        self.version = -1
        self._set_mean(mean_share)
        rate, factor = np.float32(step.learning_rate), np.float32(step.momentum)

        def follow_chunk(job: tuple[int, bytes]) -> None:
            index, frame = job
            if self._manifest.is_buffer(index):
                self._receive_buffers(index, frame)
                return
            weights = self._chunk(self.weights, index)
            sent = new_vector(len(weights))
            decode_into(frame, sent)
            with np.errstate(over="ignore", invalid="ignore"):
                apply_change(weights, sent)
                if self.residual is not None:
                    residual = self._chunk(self.residual, index)
                    np.subtract(residual, sent, out=sent)
                    residual.fill(0.0)
                else:
                    np.negative(sent, out=sent)
                if self.owed is not None:
                    self._chunk(self.owed, index).fill(0.0)
                if self.momentum is not None:
                    # sent = residual - rate * (average + factor * momentum after), solved for it
                    momentum = self._chunk(self.momentum, index)
                    np.multiply(momentum, factor, out=momentum)
                    average = (sent / rate - factor * momentum) / (np.float32(1.0) + factor)
                    np.add(momentum, average, out=momentum)
                if self.mean is not None:
                    add_to_mean(self._chunk(self.mean, index), weights, mean_share)

        self._pool.run(follow_chunk, enumerate(frames))
        self.version = version

    def _set_mean(self, mean_share: float) -> None:
        """Begin the mean of versions, or drop it."""
        if not mean_share:
            self.mean = None
        elif self.mean is None:
            self.mean = self.weights.copy()

    def _desire(self, average: Vector, index: int, step: OuterStep, room: Vector) -> None:
        """Turn a chunk's average into the desired change, and advance the momentum, in place."""
        zeros = self._zeros[: len(average)]
        residual = zeros if self.residual is None else self._chunk(self.residual, index)
        momentum = residual if self.momentum is None else self._chunk(self.momentum, index)
        keeps = self.momentum is not None
        desired_change(average, momentum, residual, step, keeps_momentum=keeps, room=room)

    def _move(
        self, index: int, desired: Vector, sent: Vector, mean_share: float, room: Vector
    ) -> Vector:
        """Move a chunk's weights by what is sent; the rest waits in the residual. Returns them."""
        weights = self._chunk(self.weights, index)
        apply_change(weights, sent)
        if self.residual is not None:
            np.subtract(desired, sent, out=self._chunk(self.residual, index))
        if self.mean is not None:
            add_to_mean(self._chunk(self.mean, index), weights, mean_share, room=room)
        return weights

    def _chunk(self, vector: Vector, index: int) -> Vector:
        start, stop = self._manifest.chunk_range(index)
        return vector[start:stop]


def batched(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield lists of `count` items, the last one shorter."""
    each = iter(items)
    while some := list(islice(each, count)):
        yield some

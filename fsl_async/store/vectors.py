"""Vectors: weights, momentum, residual and mean of the newest version, resident in memory.

A version is made in two passes over memory, chunk by chunk, on the threads of a pool:

    propose    computes the coded change and the digest of the next weights, and changes nothing
    apply      advances the vectors in place, by the change that was written

Between the two the change becomes durable. So a failed write leaves everything as it was, and after
a crash `apply` makes the same bits again, from a checkpoint, the spooled deltas and the changes on
disk. The arithmetic is that of `fsl_async.store.outer`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from fsl_async.store.checkpoint import MEAN, MOMENTUM, RESIDUAL, WEIGHTS, open_flat
from fsl_async.store.digest import DIGEST_CHARACTERS, chunk_digest, digest_of, vector_digest
from fsl_async.store.outer import (
    add_to_mean,
    apply_change,
    check_finite,
    desired_change,
    lost_in_coding,
    squared_norm,
)
from fsl_codecs import bound, decode_into, encode_into, new_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from fsl_async.store.checkpoint import Checkpoint
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.files import Files
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.outer import OuterStep
    from fsl_async.store.records import StoreSettings

    Vector = NDArray[np.float32]


@frozen
class Proposed:
    """What the next version would be. digest: of its weights, as nodes compare it."""

    digest: str
    update_bytes: int
    update_norm: float
    average_norm: float


@frozen
class _ChunkProposed:
    frame: bytes
    digest: bytes
    sent_squared: float
    average_squared: float


class Vectors:
    """The vectors of version `version`: float32, (manifest.values,); None where zeros."""

    def __init__(self, manifest: Manifest, settings: StoreSettings, pool: ChunkPool) -> None:
        self.version = -1
        self.weights = new_vector(manifest.values)
        self.momentum = new_vector(manifest.values) if settings.outer.has_momentum else None
        # fp32 frames are lossless, so the residual stays zero.
        self.residual = (
            new_vector(manifest.values) if settings.codec_down.format != "fp32" else None
        )
        self.mean: Vector | None = None
        self._manifest = manifest
        self._spec = settings.codec_down
        self._pool = pool

    @property
    def named(self) -> dict[str, Vector]:
        """The vectors by the names of their files in a checkpoint, without those that are zeros."""
        named = {WEIGHTS: self.weights, MOMENTUM: self.momentum, RESIDUAL: self.residual}
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
        """The weights of a chunk, which the next `apply` changes. Raises IndexError."""
        return self._chunk(self.weights, index)

    def digest(self) -> str:
        """The digest of the weights, computed."""
        return digest_of(self.weights, self._pool.each)

    def propose(
        self, averages: Iterable[Vector], step: OuterStep, take: Callable[[bytes], object]
    ) -> Proposed:
        """Compute the version after this one; the vectors stay as they are.

        averages: the round's average, chunk by chunk, each valid until the next. take: is called
        with each frame of the coded change, in order.

        Raises StoreError when the result is not finite, and what `averages` and `take` raise.
        """
        digests: list[bytes] = []
        update_bytes, sent_squared, average_squared = 0, 0.0, 0.0
        jobs = ((index, step, np.array(average)) for index, average in enumerate(averages))
        for done in self._pool.each(self._propose_chunk, jobs):
            take(done.frame)
            digests.append(done.digest)
            update_bytes += len(done.frame)
            sent_squared += done.sent_squared
            average_squared += done.average_squared
        assert len(digests) == self._manifest.chunks
        return Proposed(
            vector_digest(digests)[:DIGEST_CHARACTERS],
            update_bytes,
            math.sqrt(sent_squared),
            math.sqrt(average_squared),
        )

    def _propose_chunk(self, job: tuple[int, OuterStep, Vector]) -> _ChunkProposed:
        index, step, average = job
        average_squared = squared_norm(average)
        weights = self._chunk(self.weights, index).copy()
        momentum = None if self.momentum is None else self._chunk(self.momentum, index).copy()
        sent = new_vector(len(weights))
        with np.errstate(over="ignore", invalid="ignore"):
            self._desire(average, momentum, index, step)
            room = memoryview(bytearray(bound(len(average), self._spec)))
            frame = bytes(room[: encode_into(average, room, self._spec)])
            decode_into(frame, sent)
            apply_change(weights, sent)
        sent_squared = squared_norm(sent)
        check_finite(self._manifest, index, sent_squared, weights)
        return _ChunkProposed(frame, chunk_digest(weights), sent_squared, average_squared)

    def apply(
        self,
        version: int,
        averages: Iterable[Vector],
        frames: Iterable[bytes],
        step: OuterStep,
        mean_share: float,
    ) -> None:
        """Make these the vectors of `version`, in place.

        averages: as for `propose`. frames: of the coded change, in order. mean_share: how far the
        mean of versions moves; 0: none is kept.

        After an error the vectors are of no version: `load` a checkpoint again.
        """
        self.version = -1
        self._set_mean(mean_share)

        def apply_chunk(job: tuple[int, Vector, bytes]) -> None:
            index, average, frame = job
            weights = self._chunk(self.weights, index)
            sent = new_vector(len(weights))
            momentum = None if self.momentum is None else self._chunk(self.momentum, index)
            with np.errstate(over="ignore", invalid="ignore"):
                self._desire(average, momentum, index, step)
                decode_into(frame, sent)
                apply_change(weights, sent)
                if self.residual is not None:
                    lost_in_coding(average, sent)
                    self._chunk(self.residual, index)[:] = average
                if self.mean is not None:
                    add_to_mean(self._chunk(self.mean, index), weights, mean_share)

        pairs = zip(averages, frames, strict=True)
        jobs = ((index, np.array(one), frame) for index, (one, frame) in enumerate(pairs))
        self._pool.run(apply_chunk, jobs)
        self.version = version

    def follow(
        self, version: int, frames: Iterable[bytes], step: OuterStep, mean_share: float
    ) -> None:
        """Make these the vectors of `version` by its coded change alone.

        The weights are exact. Momentum is what it would be if nothing had been lost in coding, and
        the residual begins again at zero. See `apply` for the rest.
        """
        self.version = -1
        self._set_mean(mean_share)
        rate, factor = np.float32(step.learning_rate), np.float32(step.momentum)

        def follow_chunk(job: tuple[int, bytes]) -> None:
            index, frame = job
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

    def _desire(
        self, average: Vector, momentum: Vector | None, index: int, step: OuterStep
    ) -> None:
        """Turn a chunk's average into the desired change, and advance `momentum`, in place."""
        zeros = np.zeros(len(average) if self.residual is None else 0, np.float32)
        residual = zeros if self.residual is None else self._chunk(self.residual, index)
        kept = zeros if momentum is None else momentum
        desired_change(average, kept, residual, step, keeps_momentum=momentum is not None)

    def _chunk(self, vector: Vector, index: int) -> Vector:
        start, stop = self._manifest.chunk_range(index)
        return vector[start:stop]

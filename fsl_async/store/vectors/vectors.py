"""Vectors: those of the newest version, by name, and the one loop that makes the next version.

    weights     Theta
    momentum    or others that the outer optimizer names (fsl_async.store.rules.outer)
    residual    the coding error not yet sent; absent where coding loses nothing
    owed        factors of what a rule of adapters could not fit into their rank
    mean        mean of versions, of late ones above all, in a run without a planned end

They are in memory, or mapped from scratch files (fsl_async.store.vectors.memory). `advance` passes
over them once, chunk by chunk, in place, on the threads of a pool: it takes a chunk of the round's
average, makes the outer step, codes the change, adds it to the weights, and hashes these. Recovery
calls it again with the same average.

The change becomes durable after the pass. Where that fails, memory is in the state that a process
has lost that died then, and is restored as after a crash (fsl_async.store.commit.newest).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import count, repeat
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from fsl_async.store.disk.chunk_files import (
    DIGEST_CHARACTERS,
    chunk_digest,
    digest_of,
    vector_digest,
)
from fsl_async.store.rules.outer import add_to_mean, check_finite, squared_norm
from fsl_async.store.versions.checkpoint import MEAN, OWED, RESIDUAL, WEIGHTS, flat_name, open_flat
from fsl_codecs import CodecSpec, bound, decode_into, encode, encode_into, new_vector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.disk.chunk_pool import ChunkPool
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.rules.outer import OuterStep
    from fsl_async.store.settings import StoreSettings
    from fsl_async.store.versions.checkpoint import Checkpoint

    Vector = NDArray[np.float32]


Fill = Callable[["NDArray[np.float32]"], "NDArray[np.float32]"]
"""Computes a chunk of an average, in any thread, once.

Takes memory of the chunk's length for the result, float32, and returns the result, which may be
elsewhere and is the caller's.
"""
Chunks = Iterable[Fill]

STEP_VALUES = 1 << 15
"""Values of which an outer step is made at a time: its vectors' fit a processor's cache."""

LOSSLESS = CodecSpec(format="fp32")
"""Format of buffers, and of weights that are sent in full."""


@frozen
class Change:
    """A step from one version to the next. digest: of the weights after it, as nodes compare it."""

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
        self.average, self.sent = new_vector(values), new_vector(values)
        self.coded = memoryview(bytearray(coded_bytes))


class Vectors:
    """The vectors of version `version`: float32, (manifest.values,), by the names of their files.

    allocate: returns memory for so many values, zeros.
    """

    def __init__(
        self,
        manifest: Manifest,
        settings: StoreSettings,
        pool: ChunkPool,
        allocate: Callable[[int], Vector] = new_vector,
    ) -> None:
        self.version = -1
        self._manifest = manifest
        self._outer = settings.outer
        self._spec = settings.codec_down
        self._pool = pool
        self._allocate = allocate
        self._state = {name: flat_name(name) for name in settings.outer.vectors}
        names = [WEIGHTS, *self._state.values()]
        if settings.loses_in_coding:
            names.append(RESIDUAL)
        if settings.keeps_owed:
            names.append(OWED)
        self.named = {name: allocate(manifest.values) for name in names}
        self._scratch: list[_Scratch] = []
        """Unused; at most as many exist as the pool takes chunks at once."""

    def load(self, files: Files, checkpoint: Checkpoint) -> None:
        """Read a checkpoint; a vector that it lacks is zeros. Raises Damage, OSError."""
        self.version = -1
        self._keep_mean(is_kept=MEAN in checkpoint.files)
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
        """Return the weights of a chunk, which the next version changes. Raises IndexError."""
        return self._chunk(self.named[WEIGHTS], index)

    def digest(self) -> str:
        """Return the digest of the weights, computed."""
        weights = self.named[WEIGHTS]
        return digest_of(weights, self._pool.each, weights=self._manifest.weights)

    def advance(
        self,
        version: int,
        averages: Chunks,
        step: OuterStep,
        mean_share: float,
        *,
        take: Callable[[bytes], object] | None = None,
        frames: Iterable[bytes] | None = None,
        sets: bool = False,
    ) -> Change:
        """Make these the vectors of `version`, the next one, in place.

        averages: the round's average, chunk by chunk. mean_share: how far the mean of versions
        moves; 0: none is kept. take: is called with each frame of the coded change, in order.
        frames: those of the coded change, where the version was made before. sets: the averages are
        the next weights themselves, and nothing is coded.

        Raises StoreError when the result is not finite, and what `averages` and `take` raise. After
        an error the vectors are of no version: `load` a checkpoint again.
        """

        def make(index: int, fill: Fill, frame: bytes | None, scratch: _Scratch) -> _ChunkDone:
            values = self._manifest.chunk_values(index)
            average = self._filled(index, fill, scratch.average[:values])
            if sets:
                return self._set_chunk(index, average, scratch.sent[:values])
            if self._manifest.is_buffer(index):
                return self._replace_chunk(index, average, frame)
            return self._step_chunk(index, scratch, values, step, frame)

        def finish(job: tuple[int, Fill, bytes | None]) -> _ChunkDone:
            try:
                scratch = self._scratch.pop()
            except IndexError:  # all are in use
                scratch = self._new_scratch()
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    done = make(*job, scratch)
                    if mean_share:
                        self._move_mean(job[0], mean_share, scratch.sent)
            finally:
                self._scratch.append(scratch)
            return done

        self.version = -1
        self._keep_mean(is_kept=mean_share > 0.0)
        digests: list[bytes] = []
        update_bytes, sent_squared, average_squared = 0, 0.0, 0.0
        given: Iterable[bytes | None] = repeat(None) if frames is None else frames
        for done in self._pool.each(finish, zip(count(), averages, given, strict=False)):
            if take is not None and done.frame:
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

    def _new_scratch(self) -> _Scratch:
        values = self._manifest.longest_chunk
        return _Scratch(values, bound(values, self._spec))

    def _filled(self, index: int, fill: Fill, room: Vector) -> Vector:
        """Return a chunk of the average, in `room`; keep what is owed after it."""
        rows = fill(room)
        average = rows
        if OWED in self.named:
            average, owed = rows
            np.copyto(self._chunk(self.named[OWED], index), owed)
        if average is not room:
            room = room[: len(average)]
            np.copyto(room, average)
        return room

    def _step_chunk(
        self, index: int, scratch: _Scratch, values: int, step: OuterStep, frame: bytes | None
    ) -> _ChunkDone:
        """Make the outer step. frame: its coded change, if it was made before."""
        average, sent = scratch.average[:values], scratch.sent[:values]
        average_squared = squared_norm(average)
        vectors = {name: self._chunk(self.named[file], index) for name, file in self._state.items()}
        residual = self._chunk(self.named[RESIDUAL], index) if RESIDUAL in self.named else None
        for first in range(0, values, STEP_VALUES):
            some = slice(first, first + STEP_VALUES)
            state = {name: vector[some] for name, vector in vectors.items()}
            change = self._outer.step(average[some], state, step)
            # Into memory of this job: an optimizer may return one of its vectors.
            np.add(change, 0.0 if residual is None else residual[some], out=average[some])
        desired = average
        if frame is None:
            frame = bytes(scratch.coded[: encode_into(desired, scratch.coded, self._spec)])
        decode_into(frame, sent)
        weights = self.weights_chunk(index)
        # The one fp32 add that the parameter server and every client make.
        np.add(weights, sent, out=weights)
        if residual is not None:
            np.subtract(desired, sent, out=residual)
        sent_squared = squared_norm(sent)
        check_finite(self._manifest, index, sent_squared, weights)
        return _ChunkDone(frame, chunk_digest(weights), sent_squared, average_squared)

    def _replace_chunk(self, index: int, average: Vector, frame: bytes | None) -> _ChunkDone:
        """Set a chunk of buffers to their average, which is sent as it is; empty: there is none."""
        buffers = self.weights_chunk(index)
        if frame is not None:
            decode_into(frame, buffers)
        elif len(average):
            np.copyto(buffers, average)
        check_finite(self._manifest, index, 0.0, buffers)
        return _ChunkDone(frame or encode(buffers, LOSSLESS), chunk_digest(buffers), 0.0, 0.0)

    def _set_chunk(self, index: int, values: Vector, room: Vector) -> _ChunkDone:
        """Set a chunk of weights to these values, of which nothing is coded."""
        weights = self.weights_chunk(index)
        squared = squared_norm(np.subtract(values, weights, out=room))
        check_finite(self._manifest, index, squared, values)
        np.copyto(weights, values)
        return _ChunkDone(b"", chunk_digest(weights), squared, 0.0)

    def follow(self, version: int, frames: Iterable[bytes], mean_share: float) -> None:
        """Make these the vectors of `version` by its coded change alone.

        The weights and their mean are exact; all other vectors begin again at zero. See `advance`
        for the rest.
        """

        def follow_chunk(job: tuple[int, bytes]) -> None:
            index, frame = job
            weights = self.weights_chunk(index)
            sent = new_vector(len(weights))
            decode_into(frame, sent)
            if self._manifest.is_buffer(index):
                np.copyto(weights, sent)
            else:
                np.add(weights, sent, out=weights)
            for name in self.named.keys() - {WEIGHTS, MEAN}:
                self._chunk(self.named[name], index).fill(0.0)
            if mean_share:
                self._move_mean(index, mean_share, sent)

        self.version = -1
        self._keep_mean(is_kept=mean_share > 0.0)
        self._pool.run(follow_chunk, enumerate(frames))
        self.version = version

    def adopt(self, version: int, weights: Iterable[Vector], *, keeps_state: bool) -> Change:
        """Make these the vectors of `version`, with weights that come from elsewhere.

        The mean stays as it is, and so do the optimizer's vectors if `keeps_state`; all others
        begin again at zero. weights: chunk by chunk. See `advance` for the rest.
        """
        self.version = -1
        zeros = self.named.keys() - self.not_zero(keeps_state=keeps_state).keys()
        room, squared, digests = new_vector(self._manifest.longest_chunk), 0.0, []
        for index, values in enumerate(weights):
            done = self._set_chunk(index, values, room[: len(values)])
            squared += done.sent_squared
            digests.append(done.digest)
            for name in zeros:
                self._chunk(self.named[name], index).fill(0.0)
        self.version = version
        return Change(vector_digest(digests)[:DIGEST_CHARACTERS], 0, math.sqrt(squared), 0.0)

    def not_zero(self, *, keeps_state: bool) -> dict[str, Vector]:
        """Return the vectors that `adopt` does not set to zero."""
        kept = {WEIGHTS, MEAN, *(self._state.values() if keeps_state else ())}
        return {name: vector for name, vector in self.named.items() if name in kept}

    def _keep_mean(self, *, is_kept: bool) -> None:
        """Begin the mean of versions, or drop it."""
        if not is_kept:
            self.named.pop(MEAN, None)
        elif MEAN not in self.named:
            self.named[MEAN] = self._allocate(self._manifest.values)
            np.copyto(self.named[MEAN], self.named[WEIGHTS])

    def _move_mean(self, index: int, share: float, room: Vector) -> None:
        """Move the mean towards the weights; buffers have no mean, but their newest values."""
        weights, mean = self.weights_chunk(index), self._chunk(self.named[MEAN], index)
        if self._manifest.is_buffer(index):
            np.copyto(mean, weights)
        else:
            add_to_mean(mean, weights, share, room=room[: len(weights)])

    def _chunk(self, vector: Vector, index: int) -> Vector:
        start, stop = self._manifest.chunk_range(index)
        return vector[start:stop]

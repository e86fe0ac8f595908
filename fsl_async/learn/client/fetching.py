"""A version on its way to a client: its chunks are checked, and its weights hashed, as they come.

A client reports the digest of a version's weights. Each chunk is hashed when it has come, while it
is in the cache, in any order (fsl_async.store.disk.chunk_files): nothing is left to hash at the
end.

A full version is decoded into the vector that will be the base. An update is added to a copy of the
base's chunk, or takes the place of it where that holds buffers, which shows that it decodes and
what the weights will be; then its frame is kept, and the base stays as it is until the version is
whole (docs/adr/0002).

In a run of zeroth order all versions that this client missed come as one frame of scalars. They are
replayed on a copy of the base, which will be the base (`Replay`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import define, field

from fsl_async.store.disk.chunk_files import DIGEST_CHARACTERS, chunk_digest, vector_digest
from fsl_async.store.errors import LearnerError
from fsl_codecs import (
    CodecError,
    add_signs,
    decode_accumulate,
    decode_into,
    decode_seeds,
    direction_keys,
    info,
    new_vector,
)

if TYPE_CHECKING:
    from fsl_async.learn.client.ports import Vector
    from fsl_async.store.disk.chunk_pool import ChunkPool
    from fsl_async.store.model.manifest import Manifest

_DONE = b""
"""In the place of a frame that is not needed any more; no frame is empty."""


@define(eq=False)
class Fetch:
    """The chunks of one version. For one thread at a time.

    base: float32, all values of the model, a version or global weights: an update is added to it,
    and nothing writes it before `write_to`. None for a full version. target: a full version is
    decoded to it, of the same shape; it is of no use before all chunks are here. None for an
    update. is_global: the version is global weights.
    """

    _manifest: Manifest
    version: int
    _base: Vector | None = field(default=None, kw_only=True)
    target: Vector | None = field(default=None, kw_only=True)
    is_global: bool = field(default=False, kw_only=True)
    _frames: list[bytes | None] = field(init=False)
    _digests: list[bytes] = field(init=False)
    _scratch: Vector | None = field(default=None, init=False)  # for one chunk

    def __attrs_post_init__(self) -> None:
        self._frames = [None] * self.chunks
        self._digests = [b""] * self.chunks

    @property
    def chunks(self) -> int:
        """Chunks of a version."""
        return self._manifest.chunks

    @property
    def missing(self) -> int:
        """How many chunks are not here yet."""
        return self._frames.count(None)

    @property
    def digest(self) -> str:
        """The digest of the version's weights; only when no chunk is missing."""
        assert not self.missing
        return vector_digest(self._digests)[:DIGEST_CHARACTERS]

    def put(self, index: int, frame: bytes) -> None:
        """Take one chunk, in any order; the same again is ignored.

        Raises LearnerError for a frame that is damaged or of a wrong size, which leaves all as it
        was.
        """
        if not 0 <= index < self.chunks:
            raise LearnerError(f"version {self.version} has {self.chunks} chunks, no chunk {index}")
        if self._frames[index] is not None:
            return
        expected = self._manifest.chunk_values(index)
        try:
            found = info(frame).values
            if found != expected:
                raise LearnerError(
                    f"chunk {index} of version {self.version} has {found} values, not {expected}"
                )
            values = self._decoded(index, frame)
        except CodecError as error:
            raise LearnerError(
                f"chunk {index} of version {self.version} cannot be decoded: {error}"
            ) from error
        self._digests[index] = chunk_digest(values)
        self._frames[index] = _DONE if self._base is None else bytes(frame)

    def write_to(self, new: Vector, pool: ChunkPool) -> None:
        """Make `new`, perhaps the base itself, this version: one fp32 addition to each weight.

        Only when no chunk is missing. Cannot fail for what is in a frame: each has been added once,
        to a copy.
        """
        base = self._base
        if base is None:
            return  # it is in the target

        def write_chunk(index: int) -> None:
            frame = self._frames[index]
            assert frame is not None
            chunk = self._chunk(new, index)
            if self._manifest.is_buffer(index):
                decode_into(frame, chunk)
            else:
                if new is not base:
                    chunk[:] = self._chunk(base, index)
                decode_accumulate(frame, chunk, 1.0)  # times one is exact
            self._frames[index] = _DONE

        pool.run(write_chunk, range(self.chunks))

    def _decoded(self, index: int, frame: bytes) -> Vector:
        """The version's weights in a chunk, good until the next call. Raises CodecError."""
        if self.target is not None:
            chunk = self._chunk(self.target, index)
            decode_into(frame, chunk)
            return chunk
        assert self._base is not None
        old = self._chunk(self._base, index)
        if self._scratch is None:
            self._scratch = new_vector(self._manifest.longest_chunk)
        chunk = self._scratch[: len(old)]
        if self._manifest.is_buffer(index):
            decode_into(frame, chunk)
        else:
            chunk[:] = old
            decode_accumulate(frame, chunk, 1.0)
        return chunk

    def _chunk(self, vector: Vector, index: int) -> Vector:
        start, stop = self._manifest.chunk_range(index)
        return vector[start:stop]


@define(eq=False)
class Replay:
    """The scalars of the versions after a base, replayed on a copy. Like `Fetch`.

    base: float32, of version `since`; nothing writes it meanwhile. target: of the same shape.
    seed: of the run's directions.
    """

    chunks: ClassVar[int] = 1
    is_global: ClassVar[bool] = False
    _manifest: Manifest
    version: int
    _base: Vector = field(kw_only=True)
    _since: int = field(kw_only=True)
    target: Vector = field(kw_only=True)
    _seed: int = field(kw_only=True)
    _pool: ChunkPool = field(kw_only=True)
    digest: str = field(default="", init=False)

    @property
    def missing(self) -> int:
        """How many frames are not here yet."""
        return not self.digest

    def put(self, index: int, frame: bytes) -> None:
        """Take the frame; the same again is ignored.

        Raises LearnerError for one that is damaged or of other versions.
        """
        if index:
            raise LearnerError(f"version {self.version} is one frame of scalars, not {index + 1}")
        if self.digest:
            return
        try:
            found = decode_seeds(frame)
        except CodecError as error:
            raise LearnerError(
                f"the scalars of version {self.version} cannot be decoded: {error}"
            ) from error
        rounds, steps, probes = found.scalars.shape
        if not found.first <= self._since < found.first + rounds == self.version:
            raise LearnerError(
                f"scalars from version {found.first} to {found.first + rounds}, expected from"
                f" {self._since} to {self.version}"
            )
        done = self._since - found.first  # the parameter server may not know yet
        keys = direction_keys(self._seed, self._since, rounds - done, steps, probes)
        scalars = found.scalars[done:].ravel()

        def replay_chunk(number: int) -> bytes:
            start, stop = self._manifest.chunk_range(number)
            chunk = self.target[start:stop]
            chunk[:] = self._base[start:stop]
            add_signs(chunk, start, keys, scalars)
            return chunk_digest(chunk)

        digests = self._pool.each(replay_chunk, range(self._manifest.chunks))
        self.digest = vector_digest(digests)[:DIGEST_CHARACTERS]

    def write_to(self, new: Vector, pool: ChunkPool) -> None:
        """Do nothing: the version is in the target."""

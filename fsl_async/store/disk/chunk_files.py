"""Chunk files: vectors and coded changes on disk, written and checked chunk by chunk.

Digests: BLAKE3 (O'Connor et al., 2020, https://github.com/BLAKE3-team/BLAKE3-specs). Pure.

    of a chunk      BLAKE3 of its values as little-endian fp32
    of a vector     BLAKE3 of the digests of its chunks, one after the other

So chunks may be hashed in any order, by several threads, each where it is in the cache anyway, and
the beginning of a chunk's digest is also the checksum by which the chunk is checked when it is read
alone. Nodes of a run compare digests of whole vectors.

Flat files: a vector of fp32 values as a safetensors file, written and read chunk by chunk.

A checkpoint's weights therefore open in the safetensors library and everything built on it: a flat
vector in the manifest's order is the data part of such a file.

A flat file has a checksum per chunk, which is checked when the chunk is read, and one digest
(fsl_async.store.disk.chunk_files). Both are kept in the version's manifest.json.

The header follows from the manifest alone, so a reader compares it byte by byte, and the digest is
that of the vector: for weights.safetensors the one that the nodes of a version compare.

Frame files: coded chunks one after the other, as they arrived.

Used for spooled deltas and for a version's update.

    8 bytes    b"FSLFRM01"
    then, for every chunk in order:
        4 bytes    length of the frame, unsigned little-endian
        n bytes    the frame, as fsl_codecs made it (it carries its own checksum)

Its digest is BLAKE3 of the digests of its frames. There is no index: the lengths lead from frame to
frame. A file can be written while its frames arrive, and one pass over the lengths (a few bytes per
chunk) finds every frame.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from fsl_async.files.safetensors_header import header_of
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.model import manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike, Files
    from fsl_async.store.model.manifest import Manifest


DIGEST_CHARACTERS = 32
"""Length of a version's digest: the first of the 64 characters that BLAKE3 has."""

CHECK_CHARACTERS = 8
"""Length of a chunk's checksum: the first characters of its digest."""


def chunk_digest(values: NDArray[np.float32]) -> bytes:
    """Return the digest of a chunk: float32, contiguous. 32 bytes. Releases the GIL."""
    return blake3(values.astype("<f4", copy=False).data.cast("B")).digest()


def vector_digest(chunks: Iterable[bytes]) -> str:
    """Return the digest of a vector by those of all its chunks, in order: 64 hex characters."""
    return blake3(b"".join(chunks)).hexdigest()


def digest_of(
    values: NDArray[np.float32],
    each: Callable[..., Iterable[bytes]] = map,
    *,
    weights: int | None = None,
) -> str:
    """Return the digest that nodes compare: 32 characters.

    values: a flat vector, float32, contiguous. each: `map`, or one on several threads. weights: how
    many of the values are weights; buffers follow, in chunks of their own. None: all.
    """
    step = manifest.CHUNK_VALUES
    kinds = (values[:weights], values[len(values) if weights is None else weights :])
    parts = (kind[at : at + step] for kind in kinds for at in range(0, len(kind), step))
    return vector_digest(each(chunk_digest, parts))[:DIGEST_CHARACTERS]


def check_of(digest: bytes) -> str:
    """Return the checksum that a chunk's digest gives."""
    return digest[: CHECK_CHARACTERS // 2].hex()


def check_chunk(name: str, checks: str, index: int, data: memoryview | bytes) -> None:
    """Compare chunk `index` of the file `name` with its checksum. Raises Damage.

    checks: CHECK_CHARACTERS for every chunk.
    """
    expected = checks[index * CHECK_CHARACTERS : (index + 1) * CHECK_CHARACTERS]
    if check_of(blake3(data).digest()) != expected:
        raise Damage(name, f"does not match the checksum of chunk {index}")


VALUE_BYTES = 4


def header_for(manifest: Manifest) -> bytes:
    """Return the length field and the JSON header of `manifest`'s flat file."""
    return header_of(
        (tensor.name, "F32", tensor.shape, tensor.values * VALUE_BYTES)
        for tensor in manifest.tensors
    )


class FlatWriter:
    """Writes a flat file from first to last value, and computes its digest. Always close it."""

    def __init__(self, files: Files, path: Path, manifest: Manifest) -> None:
        self._files = files
        self._offset = self._synced = 0
        self._digests: list[bytes] = []
        self._descriptor = files.create(path)
        header = header_for(manifest)
        try:
            files.write(self._descriptor, header, 0)
        except BaseException:
            files.close(self._descriptor)
            raise
        self._offset = len(header)

    def append(self, values: NDArray[np.float32]) -> None:
        """Write the next chunk: float32, one-dimensional, contiguous."""
        little = values.astype("<f4", copy=False)
        self._files.write(self._descriptor, little.data.cast("B"), self._offset)
        self._digests.append(chunk_digest(values))
        self._offset += little.nbytes

    @property
    def digest(self) -> str:
        """The digest of the values so far that nodes compare."""
        return vector_digest(self._digests)[:DIGEST_CHARACTERS]

    @property
    def checks(self) -> str:
        """The checksums of the chunks so far."""
        return "".join(map(check_of, self._digests))

    def sync_some(self, least_bytes: int) -> None:
        """Make durable what is not, if it is so much, and keep it out of the page cache."""
        if self._offset - self._synced >= least_bytes:
            self._files.sync_past_cache(self._descriptor, self._synced, self._offset)
            self._synced = self._offset

    def sync(self) -> tuple[int, str]:
        """Make the content durable; return the file's bytes and the digest of the vector."""
        self._files.sync(self._descriptor)
        return self._offset, vector_digest(self._digests)

    def close(self) -> None:
        """Close the descriptor."""
        self._files.close(self._descriptor)


class FlatReader:
    """Reads and checks chunks of a flat file with known manifest and checksums.

    Raises Damage, OSError.
    """

    def __init__(self, files: Files, path: Path, manifest: Manifest, checks: str) -> None:
        self._files = files
        self._path = path
        self._manifest = manifest
        self._checks = checks
        header = header_for(manifest)
        self._data_at = len(header)
        try:
            self._descriptor = files.open_existing(path)
        except FileNotFoundError:
            raise Damage(path.name, "is missing") from None
        if files.read(self._descriptor, len(header), 0) != header:
            self.close()
            raise Damage(path.name, "has a wrong header")

    def read_into(self, index: int, out: NDArray[np.float32]) -> None:
        """Read chunk `index` into `out`, which has its length."""
        start, _ = self._manifest.chunk_range(index)
        view = out.data.cast("B")
        filled = self._files.read_into(self._descriptor, view, self._data_at + start * VALUE_BYTES)
        if filled != len(view):
            raise Damage(self._path.name, f"ends before chunk {index}")
        check_chunk(self._path.name, self._checks, index, view)
        if sys.byteorder == "big":
            out.byteswap(inplace=True)

    def close(self) -> None:
        """Close the descriptor."""
        self._files.close(self._descriptor)


def misfit(files: Files, descriptor: int, manifest: Manifest) -> str | None:
    """Return why an open file is no flat file of the model, by its length and header, or None."""
    header = header_for(manifest)
    size = len(header) + manifest.values * VALUE_BYTES
    if files.size(descriptor) != size:
        return f"has {files.size(descriptor)} bytes instead of {size}"
    return None if files.read(descriptor, len(header), 0) == header else "has a wrong header"


def chunks_of(
    files: Files, descriptor: int, manifest: Manifest, first: int = 0
) -> Iterator[NDArray[np.float32]]:
    """Yield the chunks of an open file without a `misfit`, each valid until the next; unchecked."""
    data_at = len(header_for(manifest))
    buffer = np.empty(manifest.longest_chunk, np.dtype("<f4"))
    for index in range(first, manifest.chunks):
        start, stop = manifest.chunk_range(index)
        values = buffer[: stop - start]
        files.read_into(descriptor, values.data.cast("B"), data_at + start * VALUE_BYTES)
        yield values


def check_flat_file(
    files: Files, path: Path, manifest: Manifest, size: int, digest: str
) -> str | None:
    """Return what is wrong with a flat file, or None. Reads it in chunks."""
    if size != len(header_for(manifest)) + manifest.values * VALUE_BYTES:
        return "is listed with a length that does not fit the model"
    try:
        with files.opened(path) as descriptor:
            problem = misfit(files, descriptor, manifest)
            if problem is None:
                found = vector_digest(map(chunk_digest, chunks_of(files, descriptor, manifest)))
                problem = None if found == digest else "does not match its digest"
            return problem
    except FileNotFoundError:
        return "is missing"


MAGIC = b"FSLFRM01"
MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 4


class FrameWriter:
    """Appends frames to a file, and keeps its length, its digest and a checksum of each frame.

    No other writer may use the file. It is opened and closed for each call, because a thousand
    clients may send at once and a process has a thousand descriptors. A frame whose write failed is
    written again at the same offset.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self.path = path
        self.frames = 0
        self._digests: list[bytes] = []
        with files.created(path) as descriptor:
            files.write(descriptor, MAGIC, 0)
        self.bytes = len(MAGIC)

    def append(self, *frames: BytesLike) -> None:
        """Write the next frames."""
        views = [memoryview(frame).cast("B") for frame in frames]
        longest = max(map(len, views), default=0)
        if longest > MAX_FRAME_BYTES:
            raise StoreError(f"a frame of {longest} bytes is longer than {MAX_FRAME_BYTES}")
        lengths = (len(view).to_bytes(_LENGTH_BYTES, "little") for view in views)
        record = b"".join(chain.from_iterable(zip(lengths, views, strict=True)))
        with self._files.opened(self.path, writable=True) as descriptor:
            self._files.write(descriptor, record, self.bytes)
        self._digests.extend(blake3(view).digest() for view in views)
        self.bytes += len(record)
        self.frames += len(views)

    def sync(self) -> tuple[int, str]:
        """Make the content durable; return the file's bytes and its digest.

        First cuts off the remains of a failed write behind the last frame.
        """
        with self._files.opened(self.path, writable=True) as descriptor:
            if self._files.size(descriptor) > self.bytes:
                self._files.truncate(descriptor, self.bytes)
            self._files.sync(descriptor)
        return self.bytes, self.digest

    @property
    def checks(self) -> str:
        """The checksums of the frames so far."""
        return "".join(map(check_of, self._digests))

    @property
    def digest(self) -> str:
        """BLAKE3 of the frames' digests so far, 64 hex characters."""
        return vector_digest(self._digests)


def frame_places(files: Files, path: Path, frames: int) -> NDArray[np.int64]:
    """Return where each frame begins and ends in the file: int64, shape (frames, 2).

    StoreError: the file does not hold exactly `frames` frames.
    """
    places = np.zeros((frames, 2), dtype=np.int64)
    with files.opened(path) as descriptor:
        size = files.size(descriptor)
        good = files.read(descriptor, len(MAGIC), 0) == MAGIC
        position = len(MAGIC)
        for row in places:
            length = int.from_bytes(files.read(descriptor, _LENGTH_BYTES, position), "little")
            row[0] = position + _LENGTH_BYTES
            position = int(row[0]) + length
            row[1] = position
            if not good or length > MAX_FRAME_BYTES or position > size:
                good = False
                break
    if not good or position != size:
        raise StoreError(f"{path} does not hold {frames} complete frames; it was altered")
    return places


def first_bytes(files: Files, path: Path, count: int) -> bytes:
    """Return how the first frame begins."""
    with files.opened(path) as descriptor:
        return files.read(descriptor, count, len(MAGIC) + _LENGTH_BYTES)


def read_frame(files: Files, path: Path, place: NDArray[np.int64]) -> bytes:
    """Return the frame at one row of `frame_places`."""
    with files.opened(path) as descriptor:
        return _frame_at(files, descriptor, path, place)


def _frame_at(files: Files, descriptor: int, path: Path, place: NDArray[np.int64]) -> bytes:
    begin, end = map(int, place)
    frame = files.read(descriptor, end - begin, begin)
    if len(frame) != end - begin:
        raise StoreError(f"{path} ends in the middle of a frame; it was altered")
    return frame


class FrameReader:
    """Reads frames of a complete file; several threads may use it. StoreError: `frame_places`."""

    def __init__(self, files: Files, path: Path, frames: int) -> None:
        self._files = files
        self._path = path
        self._places = frame_places(files, path, frames)
        self.count = frames

    def frame(self, index: int) -> bytes:
        """Return one frame. The file is opened for it: a round may have a thousand deltas."""
        return read_frame(self._files, self._path, self._places[index])


def each_frame(files: Files, path: Path, frames: int) -> Iterator[bytes]:
    """Yield all `frames` frames in order, one in memory at a time. StoreError: `frame_places`.

    The file is opened for each frame: the deltas of a thousand clients may be read side by side.
    """
    for place in frame_places(files, path, frames):
        yield read_frame(files, path, place)


def check_frame_file(files: Files, path: Path, size: int, digest: str) -> str | None:
    """Return what is wrong with a frame file, or None. Reads all of it, one frame at a time.

    It must have `size` bytes; `digest`: as `FrameWriter.digest`.
    """
    found: list[bytes] = []
    try:
        with files.opened(path) as descriptor:
            if files.size(descriptor) != size:
                return f"has {files.size(descriptor)} bytes instead of {size}"
            position = len(MAGIC)
            if files.read(descriptor, position, 0) != MAGIC:
                return "has a wrong header"
            while position < size:
                length = int.from_bytes(files.read(descriptor, _LENGTH_BYTES, position), "little")
                position += _LENGTH_BYTES + length
                if length > MAX_FRAME_BYTES or position > size:
                    return "holds an incomplete frame"
                found.append(blake3(files.read(descriptor, length, position - length)).digest())
    except FileNotFoundError:
        return "is missing"
    return None if vector_digest(found) == digest else "does not match its digest"

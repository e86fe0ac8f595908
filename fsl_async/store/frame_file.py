"""Frame files: coded chunks one after the other, as they arrived.

Used for spooled deltas and for a version's update.

    8 bytes    b"FSLFRM01"
    then, for every chunk in order:
        4 bytes    length of the frame, unsigned little-endian
        n bytes    the frame, as fsl_codecs made it (it carries its own checksum)

Its digest is BLAKE3 of the digests of its frames. There is no index: the lengths lead from frame to
frame. A file can be written while its frames arrive, and one pass over the lengths (a few bytes per
half megabyte of weights) finds every frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from fsl_async.store.digest import check_of, vector_digest
from fsl_async.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike, Files

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

    def append(self, frame: BytesLike) -> None:
        """Write the next frame."""
        view = memoryview(frame).cast("B")
        if len(view) > MAX_FRAME_BYTES:
            raise StoreError(f"a frame of {len(view)} bytes is longer than {MAX_FRAME_BYTES}")
        record = b"".join((len(view).to_bytes(_LENGTH_BYTES, "little"), view))
        with self._files.opened(self.path, writable=True) as descriptor:
            self._files.write(descriptor, record, self.bytes)
        self._digests.append(blake3(view).digest())
        self.bytes += len(record)
        self.frames += 1

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

    def frames(self, wanted: Sequence[int]) -> Iterator[bytes]:
        """Yield the frames at these indices, one in memory at a time."""
        with self._files.opened(self._path) as descriptor:
            for index in wanted:
                yield _frame_at(self._files, descriptor, self._path, self._places[index])


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

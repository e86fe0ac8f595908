"""Files: every disk call on a run directory of a server, in one small class.

The stores call `os` nowhere else. Tests can therefore count the calls, let call n fail with a full
disk, end the "process" before, during or after it, and drop what was not synced, as a power cut
would.

A file's content is durable after `sync`; its name, a rename and a removal are durable after
`sync_directory` of the folder that holds it (fsync(2), rename(2)). Crash safety depends on this
order, so callers make each call explicitly. Several threads may use the object at the same time,
each on another file. Offsets are explicit: after a failed write the next try overwrites at the same
offset.

New folders and files have modes for their owner alone: weights, deltas and journals reveal a site's
data. An existing one keeps its mode, because an operator may have opened it to a group.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

BytesLike: TypeAlias = bytes | bytearray | memoryview
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600


class Files:
    """The disk. Every method raises OSError unchanged."""

    # --- changing calls ---

    def make_directory(self, path: Path) -> None:
        """Create `path` (0700) in an existing parent; an existing folder keeps its mode."""
        path.mkdir(FOLDER_MODE, exist_ok=True)

    def create(self, path: Path) -> int:
        """Create (0600) or empty the file at `path`; return a read-write descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)

    def write(self, descriptor: int, data: BytesLike, offset: int) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(descriptor, view, offset)
            view = view[written:]
            offset += written

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Make the file's content durable."""
        os.fsync(descriptor)

    def sync_past_cache(self, descriptor: int, begin: int, end: int) -> None:
        """Make the content durable, and drop the bytes from `begin` to `end` from the page cache.

        Where the file system has no page cache to drop from, it only syncs.
        """
        self.sync(descriptor)
        with suppress(OSError):
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the folder `path` durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`, replacing an existing file atomically."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove the file at `path`."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove the empty folder at `path`."""
        path.rmdir()

    # --- calls that change nothing on the disk ---

    def open_existing(self, path: Path, *, writable: bool = False) -> int:
        """Open the file at `path`."""
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""
        os.close(descriptor)

    def lock(self, descriptor: int) -> bool:
        """Lock the file until it is closed; False when another process holds the lock."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def size(self, descriptor: int) -> int:
        """The file's length in bytes."""
        return os.fstat(descriptor).st_size

    def is_at(self, descriptor: int, path: Path) -> bool:
        """Whether the open file is the one at `path`."""
        return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())

    def exists(self, path: Path) -> bool:
        """Whether a file or folder is at `path`."""
        return path.exists()

    def is_directory(self, path: Path) -> bool:
        """Whether a folder is at `path`."""
        return path.is_dir()

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill the byte view `buffer` from `offset`; return the bytes read.

        Reads fewer only at the end of the file.
        """
        filled = 0
        while filled < len(buffer):
            count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        """Return up to `count` bytes from `offset`; fewer only at the end of the file."""
        pieces = []
        while count > 0 and (piece := os.pread(descriptor, count, offset)):
            pieces.append(piece)
            count, offset = count - len(piece), offset + len(piece)
        return b"".join(pieces)

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in the folder `path`; empty when it does not exist."""
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - a spool of many deltas is listed often
        except FileNotFoundError:
            return []

    # --- built from the calls above ---

    @contextmanager
    def opened(self, path: Path, *, writable: bool = False) -> Iterator[int]:
        """Open the file at `path` for a block."""
        descriptor = self.open_existing(path, writable=writable)
        try:
            yield descriptor
        finally:
            self.close(descriptor)

    @contextmanager
    def created(self, path: Path) -> Iterator[int]:
        """Create or empty the file at `path` for a block."""
        descriptor = self.create(path)
        try:
            yield descriptor
        finally:
            self.close(descriptor)

    def size_at(self, path: Path) -> int:
        """Return the length in bytes of the file at `path`."""
        with self.opened(path) as descriptor:
            return self.size(descriptor)

    def read_whole(self, path: Path, limit: int) -> bytes:
        """Return the content of a file; OSError (EFBIG) when it is longer than `limit` bytes."""
        with self.opened(path) as descriptor:
            size = self.size(descriptor)
            if size > limit:
                raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
            return self.read(descriptor, size, 0)

    def write_whole(self, path: Path, data: bytes) -> None:
        """Create `path` with `data` and make the content (not the name) durable."""
        with self.created(path) as descriptor:
            self.write(descriptor, data, 0)
            self.sync(descriptor)

    def remove_tree(self, path: Path) -> None:
        """Remove the folder `path`, which holds files only. An absent folder is ignored."""
        for name in self.names(path):
            self.remove(path / name)
        if self.is_directory(path):
            self.remove_directory(path)

    def remove_any(self, path: Path) -> None:
        """Remove a file, or a folder that holds files only. What is absent is ignored."""
        if self.is_directory(path):
            self.remove_tree(path)
        elif self.exists(path):
            self.remove(path)


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Create `path`, and each parent that is missing, with FOLDER_MODE. Raises OSError."""
    for parent in reversed(path.parents):
        # Not Path.mkdir(parents=True): it gives parents the default mode.
        if not parent.exists():
            parent.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(FOLDER_MODE, exist_ok=exist_ok)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created, for a block. Waits for it. Raises OSError."""
    make_folder(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`; a new one gets FILE_MODE."""
    return os.open(path, flags, FILE_MODE)


def replace_bytes(path: Path, data: bytes, *, is_new: bool = False) -> None:
    """Create or replace `path` atomically; content and name are durable on return.

    is_new: raise FileExistsError where there is one. One process at a time may do so. Raises
    OSError.
    """
    files, part = Files(), path.with_name(f".{path.name}.part")
    # What a killed process left there.
    part.unlink(missing_ok=True)
    try:
        with open(part, "xb", opener=opener) as file:
            file.write(data)
            file.flush()
            files.sync(file.fileno())
        if is_new:
            # Unlike a rename it fails where the name is taken.
            os.link(part, path)
        else:
            files.rename(part, path)
    finally:
        part.unlink(missing_ok=True)
    files.sync_directory(path.parent)

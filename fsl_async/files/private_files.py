"""Creates a run's folders and files with modes for their owner alone.

Weights, deltas and journals reveal a site's data. An existing folder or file keeps its mode,
because an operator may have opened it to a group.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsl_async.files.files import FILE_MODE, FOLDER_MODE, Files


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

"""Creates a run's folders and files with access for their owner alone: weights, deltas and journals
reveal what a site trains on.

A folder or file that exists keeps its mode: an operator may have opened one to a group.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Create `path`, and each parent that is missing, with FOLDER_MODE. Raises OSError."""
    for parent in reversed(path.parents):
        # Not Path.mkdir(parents=True): it gives parents the default mode.
        if not parent.exists():
            parent.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(FOLDER_MODE, exist_ok=exist_ok)


def opener(path: str, flags: int) -> int:
    """Opens a file for `open(..., opener=opener)`: one that is created gets FILE_MODE."""
    return os.open(path, flags, FILE_MODE)


def write_bytes(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Create or replace the content of `path`; sync: durable on return (not its name). Raises
    OSError.
    """
    with open(path, "wb", opener=opener) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())

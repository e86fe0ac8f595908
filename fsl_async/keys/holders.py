"""Stores which key uses which client name in a run: `names.txt` in the run directory.

A line is `NAME KEY CRC`; the last one of a name counts. CRC is the checksum of all lines up to its
own (`fsl_async.files.text_checksum`), so that a line that was altered, lost or moved does not
match. A line is on disk before a client is admitted under the name. A line that a crash has torn is
cut off at the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.errors import KeysError
from fsl_async.files.files import Files
from fsl_async.files.text_checksum import chained, unchained
from fsl_async.roles.names import NAME
from fsl_transport.zmq.curve import is_key

if TYPE_CHECKING:
    from pathlib import Path

FILE = "names.txt"
MOST_NAMES = 1 << 16
_MAX_BYTES = MOST_NAMES * 128


class NameHolders:
    """The names of one run. Raises KeysError where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, str] = {}
        self._size = 0
        self._checksum = 0
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror}") from None
        complete, _, _ = data.rpartition(b"\n")
        lines = complete.split(b"\n") if complete else []
        if len(data) > _MAX_BYTES:
            raise KeysError(f"{path}: longer than {_MAX_BYTES:,} bytes")
        for number, line in enumerate(lines, 1):
            found = unchained(line, self._checksum)
            body, self._checksum = found or (b"", 0)
            name, _, key = body.decode("utf-8", "replace").partition(" ")
            if not NAME.fullmatch(name) or not is_key(key):
                raise KeysError(
                    f"{path} line {number}: damaged; restore it, or remove the file and every name"
                    " is free again"
                )
            self._keys[name] = key
        self._size = len(complete) + 1 if lines else 0
        tail = data[self._size :]
        # A crash tears a line before its end, and no client was admitted by it. A complete line
        # without its newline is damage, and so are zeros without a line before them.
        if unchained(tail[:-1], self._checksum) or (not lines and b"\0" in tail):
            raise KeysError(
                f"{path}: damaged at its end; restore it, or remove the file and every name is free"
                " again"
            )

    def get(self, name: str) -> str:
        """Return the key that uses the name; empty where none does."""
        return self._keys.get(name, "")

    @property
    def is_full(self) -> bool:
        """Whether the limit of names is reached."""
        return len(self._keys) >= MOST_NAMES or self._size >= _MAX_BYTES - 128

    def hold(self, name: str, key: str) -> None:
        """Assign the name to the key, durably. Blocks for a sync of the disk.

        Raises OSError, and changes nothing then.
        """
        line, checksum = chained(f"{name} {key}".encode(), self._checksum)
        files, is_there = Files(), self._path.exists()
        opened = files.opened(self._path, writable=True) if is_there else files.created(self._path)
        with opened as descriptor:
            # A crash or a full disk may have left a part of a line.
            files.truncate(descriptor, self._size)
            files.write(descriptor, line, self._size)
            files.sync(descriptor)
        if not is_there:
            files.sync_directory(self._path.parent)
        self._size += len(line)
        self._checksum = checksum
        self._keys[name] = key

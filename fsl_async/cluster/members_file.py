"""Stores the run's members, for a restarted parameter server: `members.json` in the run directory.

One object with a checksum (`fsl_async.files.checksummed_json`). The file is replaced by a rename
whenever the members change.
After a power cut the file may be old: then a client that died while the parameter server was down
is not launched, or one that has left is. Nothing else depends on it; it may be removed between two
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from fsl_async.cluster.restarts import MOST_MEMBERS
from fsl_async.errors import RunDirError
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.private_files import replace_bytes
from fsl_async.roles.names import NAME

FILE = "members.json"
_MOST_BYTES = 1 << 20


class MembersFile:
    """Reads and writes the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> frozenset[str]:
        """Return the names; none where the file is missing or empty.

        Raises OSError, and RunDirError when the file was altered.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return frozenset()
        found = from_checksummed(data.rstrip()) if data else {"members": []}
        if found is None:
            raise RunDirError(
                f"{self.path} does not match its checksum; remove it and start again:"
                " clients that died while no parameter server ran are then not launched again"
            )
        names = map(str, found["members"])
        return frozenset([name for name in names if NAME.fullmatch(name)][:MOST_MEMBERS])

    def write(self, names: AbstractSet[str]) -> None:
        """Replace the file. Raises OSError, and leaves the old file."""
        replace_bytes(self.path, to_checksummed({"members": sorted(names)}) + b"\n")


class MembersKeeper:
    """Keeps the file up to date in a thread, so that a hanging disk does not block the loop.

    A write that fails is repeated every `AGAIN_S`. trouble: called with the first error in a row.
    """

    AGAIN_S = 60.0

    def __init__(self, file: MembersFile, trouble: Callable[[OSError], None]) -> None:
        self._file = file
        self._trouble = trouble
        self._unwritten: frozenset[str] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._pause = asyncio.Event()

    def keep(self, names: frozenset[str]) -> None:
        """Set the members. For the loop's thread."""
        self._unwritten = names
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write(), name=FILE)

    async def close(self) -> None:
        """Write what is not written yet, once."""
        self._pause.set()
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        failed = False
        while (names := self._unwritten) is not None:
            self._unwritten = None
            try:
                await asyncio.to_thread(self._file.write, names)
                failed = False
            except OSError as error:
                if not failed:
                    self._trouble(error)
                failed = True
                if self._pause.is_set():
                    break
                if self._unwritten is None:
                    self._unwritten = names
                await self._wait()
        self._writing = None

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._pause.wait(), self.AGAIN_S)
        except TimeoutError:
            return

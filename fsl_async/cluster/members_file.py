"""The clients that belong to a run, for a parameter server that starts again: `members.txt` in the
run directory.

    a name a line, and a last line with the checksum of those before it
    (`fsl_async.files.text_checksum`)

Written as a new file and renamed, whenever it changes; the rename is not synced. After a power cut
it may be older, or missing: then a client that died while the parameter server was down is not
launched, or one that said goodbye is. Nothing else depends on it; it may be removed between two
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from fsl_async.cluster.relaunches import MOST_MEMBERS
from fsl_async.errors import RunDirError
from fsl_async.files.private_files import write_bytes
from fsl_async.files.text_checksum import with_checksum, without_checksum
from fsl_async.roles.names import NAME

FILE = "members.txt"
_MOST_BYTES = 1 << 20


class MembersFile:
    """The file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> frozenset[str]:
        """The names; none where the file is missing or empty. Raises OSError, and RunDirError when
        it was altered.
        """
        try:
            with self.path.open("rb") as file:
                text = without_checksum(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return frozenset()
        if text is None:
            raise RunDirError(
                f"{self.path} does not match its checksum; remove it and start again:"
                " clients that died while no server ran are then not launched again"
            )
        lines = text.decode("ascii", "replace").split("\n")
        return frozenset([line for line in lines if NAME.fullmatch(line)][:MOST_MEMBERS])

    def write(self, names: AbstractSet[str]) -> None:
        """Replace the file. Raises OSError, and then it is as it was."""
        part = self.path.with_name(f".{self.path.name}.part")
        text = "".join(f"{name}\n" for name in sorted(names)).encode("ascii")
        write_bytes(part, with_checksum(text), sync=True)  # else a power cut could leave half of it
        part.replace(self.path)


class MembersKeeper:
    """Keeps the file up to date, off the loop: a disk that hangs stops nothing else. trouble: told
    of the first write in a row that fails; it is tried again.
    """

    AGAIN_S = 60.0

    def __init__(self, file: MembersFile, trouble: Callable[[OSError], None]) -> None:
        self._file = file
        self._trouble = trouble
        self._newest: frozenset[str] | None = None  # and not written
        self._writing: asyncio.Task[None] | None = None
        self._pause = asyncio.Event()

    def keep(self, names: frozenset[str]) -> None:
        """These are the members from now on. On the loop's thread."""
        self._newest = names
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write(), name=FILE)

    async def close(self) -> None:
        """Write what is not written yet; what fails now stays as it was."""
        self._pause.set()
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        failed = False
        while (names := self._newest) is not None:
            self._newest = None
            try:
                await asyncio.to_thread(self._file.write, names)
                failed = False
            except OSError as error:
                if not failed:
                    self._trouble(error)
                failed = True
                if self._pause.is_set():
                    break
                if self._newest is None:
                    self._newest = names
                await self._wait()
        self._writing = None

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._pause.wait(), self.AGAIN_S)
        except TimeoutError:
            return

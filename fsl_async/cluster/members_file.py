"""Who belongs to the run, for a parameter server that is started again: `members.txt` in the run directory, a name a line.

Written whole, by a rename, whenever it changes, and not synced: after a power cut it may be older, or empty, and then a client that died
while the server was away is not asked for, or one that said goodbye is. Nothing else hangs on it; it may be edited or removed between two starts.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

from fsl_async.setting_rules import NAME

FILE = "members.txt"
MOST_NAMES = 10_000
_MOST_BYTES = 1 << 20


class MembersFile:
    """The file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> frozenset[str]:
        """The names; what is no name is passed over, and where there is no file there are none. Raises OSError."""
        try:
            with self.path.open("rb") as file:
                lines = file.read(_MOST_BYTES).decode("ascii", "replace").split("\n")
        except FileNotFoundError:
            return frozenset()
        return frozenset([line for line in lines if NAME.fullmatch(line)][:MOST_NAMES])

    def write(self, names: AbstractSet[str]) -> None:
        """Replace the file. Raises OSError, and then it is as it was."""
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text("".join(f"{name}\n" for name in sorted(names)), encoding="ascii")
        part.replace(self.path)

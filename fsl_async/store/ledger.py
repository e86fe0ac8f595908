"""Ledger: what happened in a run, one synced line per fact. It decides what was acknowledged.

    ledger.jsonl    one JSON object with a checksum per line (fsl_async.files.checksummed_json),
                    with "at" (seconds since 1970), "fact" and "up" (seconds that the run has been
                    served, over all its processes)

"up" is what `run.seconds` counts. It is the sum of the processes' monotonic clocks, not the time
since the first line: a run whose ps was down over a weekend must not be over when it restarts, and
a wall clock may be set. A crash loses the time since the last line, at most one round.

Rules.
1. A fact holds from the moment `append` returns: the line is written and synced. Before that it
   does not hold.
2. Lines are only appended. A line that could not be written completely is cut off before the next
   one.
3. After a crash only the last line can be torn: it is incomplete, or a block of it is zeros. It is
   cut off when the ledger is opened. Any other line that does not match its checksum is damage to
   what was acknowledged: LedgerDamaged names the line, and nothing is guessed.
4. One process at a time: the file is locked while it is open.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fsl_async.files.checksummed_json import from_checksummed, may_be_torn, to_checksummed
from fsl_async.store.errors import LedgerDamaged, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from fsl_async.store.files import Files

_PIECE_BYTES = 4 * 1024 * 1024


class Ledger:
    """An open ledger. Call `open` first, `close` last."""

    def __init__(
        self,
        files: Files,
        path: Path,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._path = path
        self._wall_clock = wall_clock
        self._clock = clock
        self._opened_at = clock()
        self.served_before_s = 0.0
        """How long earlier processes served the run, in seconds."""
        self._descriptor: int | None = None
        # Length of the good lines; anything after them is cut off before the next append.
        self._bytes = 0
        self._clean = True

    @property
    def is_empty(self) -> bool:
        """Whether it has no complete line."""
        return not self._bytes

    def open(
        self,
        apply: Callable[[Mapping[str, Any]], None],
        may_be_new: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Create or read the ledger, calling `apply` with every fact in order.

        may_be_new: called when it is missing or has no complete line, before anything is created or
        cut off; raises if a new ledger is not allowed. Returns one line about a torn last line that
        was cut off, or None. Raises StoreError when another process holds the ledger,
        LedgerDamaged, OSError, and what `may_be_new` raises; the ledger is then closed.
        """
        try:
            return self._open(apply, may_be_new)
        except BaseException:
            self.close()
            raise

    def _open(
        self, apply: Callable[[Mapping[str, Any]], None], may_be_new: Callable[[], None]
    ) -> str | None:
        try:
            self._descriptor = self._files.open_existing(self._path, writable=True)
        except FileNotFoundError:
            may_be_new()
            self._descriptor = self._files.create(self._path)
            self._files.sync_directory(self._path.parent)
        if not self._files.lock(self._descriptor):
            raise StoreError(f"another process uses {self._path.parent}; stop it first")
        torn_line = 0
        for number, (line, end) in enumerate(self._lines(self._descriptor), start=1):
            if torn_line:
                raise LedgerDamaged(str(self._path), torn_line)
            fact = from_checksummed(line[:-1]) if line.endswith(b"\n") else None
            if fact is not None:
                apply(fact)
                self._bytes = end
                self.served_before_s = float(fact.get("up", self.served_before_s))
            elif may_be_torn(line, end - len(line)):
                torn_line = number
            else:
                raise LedgerDamaged(str(self._path), number)
        if self.is_empty:
            may_be_new()
        torn = self._files.size(self._descriptor) - self._bytes
        if not torn:
            return None
        self._clean = False
        self._cut()
        return f"{self._path.name}: the last line was torn by a crash; {torn} bytes cut off"

    @property
    def served_s(self) -> float:
        """How long the run has been served, over all its processes, in seconds."""
        return self.served_before_s + (self._clock() - self._opened_at)

    def _lines(self, descriptor: int) -> Iterator[tuple[bytes, int]]:
        """Yield every line with its newline (the last one may lack it), and its end offset."""
        rest = b""
        position = 0
        while piece := self._files.read(descriptor, _PIECE_BYTES, position + len(rest)):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                position += len(line) + 1
                yield line + b"\n", position
        if rest:
            yield rest, position + len(rest)

    def append(self, fact: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Write and sync one line; return the fact as `open` reads it.

        OSError: the fact does not hold.
        """
        if self._descriptor is None:
            raise StoreError("the ledger is closed")
        if not self._files.is_linked(self._descriptor):
            raise StoreError(
                f"{self._path} was removed while the run went on: nothing more is acknowledged; "
                "restore it from a backup"
            )
        clocks = {"at": round(self._wall_clock(), 3), "up": round(self.served_s, 3)}
        entry = {**clocks, "fact": fact, **members}
        line = to_checksummed(entry) + b"\n"
        self._cut()
        self._clean = False
        self._files.write(self._descriptor, line, self._bytes)
        self._files.sync(self._descriptor)
        self._clean = True
        self._bytes += len(line)
        return entry

    def _cut(self) -> None:
        """Cut off, durably, what a failed append left.

        Otherwise an old line could reappear behind a newer, shorter one.
        """
        if self._clean or self._descriptor is None:
            return
        self._files.truncate(self._descriptor, self._bytes)
        self._files.sync(self._descriptor)
        self._clean = True

    def close(self) -> None:
        """Close the file and release its lock; a closed ledger is ignored."""
        if self._descriptor is not None:
            self._files.close(self._descriptor)
            self._descriptor = None

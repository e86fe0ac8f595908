"""Ledger: what happened in a run, one line per fact. It decides what was acknowledged.

    ledger.jsonl    one JSON object with a checksum per line (fsl_async.files.checksummed_json),
                    with "at" (seconds since 1970), "fact" and "up" (seconds that the run has been
                    served, over all its processes)

The parameter server's facts and the split server's uploads (fsl_async.learn.split.server_disk) are
lines of such files.

"up" is what `run.seconds` counts. It is the sum of the processes' monotonic clocks, not the time
since the first line: a run whose ps was down over a weekend must not be over when it restarts, and
a wall clock may be set. A crash loses the time since the last line, at most one round.

Rules.
1. A fact holds from the moment `append` returns: the line is written and synced. Before that it
   does not hold.
2. Lines are only appended. A line that could not be written completely is cut off before the next
   one.
3. After a crash only the last line can be torn: it is incomplete, or a block of it is zeros. It is
   cut off when the ledger is opened. Any other line that is read and does not match its checksum is
   damage to what was acknowledged: LedgerDamaged names the line, and nothing is guessed.
4. One process at a time: the file is locked while it is open.
5. With `syncs` False rules 1 and 3 hold for the lines before the last `sync`. A power cut may tear
   several of the later ones: the first torn line is cut off, with all that follows it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from attrs import frozen
from blake3 import blake3

from fsl_async.files.checksummed_json import from_checksummed, may_be_torn, to_checksummed
from fsl_async.store.errors import LedgerDamaged, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from fsl_async.files.files import Files

_PIECE_BYTES = 1024 * 1024
_TAIL_BYTES = 64 * 1024


@frozen
class Position:
    """A place between two lines of a ledger, and what is before it."""

    bytes: int
    lines: int
    tail: str
    """BLAKE3 of the last 64 KiB before it. Lines have times, so another ledger has another one."""


class Ledger:
    """An open ledger. Call `open` first, `close` last."""

    def __init__(
        self,
        files: Files,
        path: Path,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        syncs: bool = True,
        gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        """gone: receives the line of `check` before that raises it."""
        self._files = files
        self._path = path
        self._syncs = syncs
        self._gone = gone
        self._wall_clock = wall_clock
        self._clock = clock
        self._opened_at = clock()
        self.served_before_s = 0.0
        """Seconds for which earlier processes served the run."""
        self._descriptor: int | None = None
        # Length and number of the good lines; what follows is cut off before the next append.
        self._bytes = 0
        self._lines = 0
        self._last_up = 0.0
        self._clean = True

    @property
    def is_empty(self) -> bool:
        """Whether it has no complete line."""
        return not self._bytes

    def position(self) -> Position:
        """Return the place after the last line, by which a checkpoint counts lines."""
        return Position(self._bytes, self._lines, self._tail(self._bytes))

    def holds(self, position: Position) -> bool:
        """Whether `position` is one of this ledger. One read of at most 64 KiB."""
        assert self._descriptor is not None, "the ledger is open"
        fits = 0 < position.bytes <= self._files.size(self._descriptor)
        return fits and self._tail(position.bytes) == position.tail

    def _tail(self, end: int) -> str:
        assert self._descriptor is not None, "the ledger is open"
        begin = max(0, end - _TAIL_BYTES)
        return blake3(self._files.read(self._descriptor, end - begin, begin)).hexdigest()

    def open(
        self,
        apply: Callable[[Mapping[str, Any]], None],
        may_be_new: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Create or read the ledger, calling `apply` with the facts in order.

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
        self._descriptor = self._locked(may_be_new)
        torn_line = 0
        for number, (line, end) in enumerate(self._read_lines(self._descriptor), start=1):
            if torn_line and not self._syncs:
                break
            if torn_line:
                raise LedgerDamaged(str(self._path), torn_line)
            fact = from_checksummed(line[:-1]) if line.endswith(b"\n") else None
            if fact is not None:
                apply(fact)
                self._bytes, self._lines = end, number
                self._last_up = float(fact.get("up", self._last_up))
            elif may_be_torn(line, end - len(line)):
                torn_line = number
            else:
                raise LedgerDamaged(str(self._path), number)
        if self.is_empty:
            may_be_new()
        self.served_before_s = self._last_up
        torn = self._files.size(self._descriptor) - self._bytes
        if not torn:
            return None
        self._clean = False
        self._cut()
        return f"{self._path.name}: the last line was torn by a crash; {torn} bytes cut off"

    def _locked(self, may_be_new: Callable[[], None]) -> int:
        """Open the file, or create it; return its descriptor, which has the lock."""
        try:
            descriptor = self._files.open_existing(self._path, writable=True)
        except FileNotFoundError:
            may_be_new()
            descriptor = self._files.create(self._path)
        self._descriptor = descriptor  # `open` closes it after an error
        self._files.sync_directory(self._path.parent)
        if not self._files.lock(descriptor):
            raise StoreError(f"another process uses {self._path.parent}; stop it first")
        return descriptor

    @property
    def served_s(self) -> float:
        """Return the seconds for which the run was served, over all its processes."""
        return self.served_before_s + (self._clock() - self._opened_at)

    def _read_lines(self, descriptor: int) -> Iterator[tuple[bytes, int]]:
        """Yield the lines, with the newline that the last one may lack, and where each ends."""
        position, rest = 0, b""
        while piece := self._files.read(descriptor, _PIECE_BYTES, position + len(rest)):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                position += len(line) + 1
                yield line + b"\n", position
        if rest:
            yield rest, position + len(rest)

    def append(self, fact: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line, and sync it if the ledger `syncs`; return the fact as `open` reads it.

        OSError, and StoreError of `check`: the fact does not hold.
        """
        descriptor = self.check()
        clocks = {"at": round(self._wall_clock(), 3), "up": round(self.served_s, 3)}
        entry = {**clocks, "fact": fact, **members}
        line = to_checksummed(entry) + b"\n"
        self._cut()
        self._clean = False
        self._files.write(descriptor, line, self._bytes)
        if self._syncs:
            self._files.sync(descriptor)
        self._clean = True
        self._bytes += len(line)
        self._lines += 1
        self._last_up = clocks["up"]
        return entry

    def sync(self) -> None:
        """Make all lines durable. OSError, and StoreError of `check`."""
        self._files.sync(self.check())

    def check(self) -> int:
        """Return the descriptor of the file, which must be at its path with all of its lines.

        StoreError: another program removed or changed it, or the run directory. Any thread.
        """
        if self._descriptor is None:
            raise StoreError("the ledger is closed")
        is_there = self._files.is_at(self._descriptor, self._path)
        if is_there and self._files.size(self._descriptor) >= self._bytes:
            return self._descriptor
        gone = self._path if self._files.names(self._path.parent) else self._path.parent
        text = (
            f"{gone} was removed, replaced or emptied while the run went on: nothing more is"
            " acknowledged; put it back as it was, or restore it from a backup"
        )
        self._gone(text)
        raise StoreError(text)

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

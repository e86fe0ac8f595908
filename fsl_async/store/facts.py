"""Facts: a run's ledger and the book derived from it, kept consistent while the run goes on.

After a failed write, two things may be outstanding, and come before anything else is written:

    a doubtful version    its folder may exist although its commit failed: it is removed, because
                          after a crash it would count as a version
    lines of versions     the version exists, but its line could not be written
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_async.store.book import Book
    from fsl_async.store.checkpoint import Checkpoints
    from fsl_async.store.ledger import Ledger
    from fsl_async.store.records import VersionRecord


class Facts:
    """The durable facts of one open run. Methods raise OSError unchanged."""

    def __init__(self, ledger: Ledger, book: Book, checkpoints: Checkpoints) -> None:
        self.book = book
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._doubtful: int | None = None
        self._owed: list[VersionRecord] = []

    def record(self, fact: str, members: Mapping[str, Any]) -> None:
        """Make a fact durable, then apply it to the book."""
        self.settle()
        self.book.apply(self._ledger.append(fact, members))

    def doubt(self, version: int) -> None:
        """Mark a version as doubtful until `believe`: its folder may appear, but does not count."""
        self._doubtful = version

    def believe(self, record: VersionRecord) -> None:
        """Apply a version that exists to the book; `settle` writes its line."""
        self._doubtful = None
        self.book.apply({"fact": "version", **record.to_fact()})
        self._owed.append(record)

    def settle(self) -> None:
        """Write or undo what is outstanding."""
        if self._doubtful is not None:
            self._checkpoints.retract(self._doubtful)
            self._doubtful = None
        while self._owed:
            self._ledger.append("version", self._owed[0].to_fact())
            self._owed.pop(0)

    def close(self) -> None:
        """Try to write outstanding lines, then release the ledger."""
        if self._owed:
            with suppress(OSError):
                self.settle()
        with suppress(OSError):
            self._ledger.close()

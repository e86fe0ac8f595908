"""Facts: a run's ledger and the book derived from it, kept consistent while the run goes on.

After a failed write, two things may be outstanding, and come before anything else is written:

    an unconfirmed version    its folder may exist although its commit failed: it is removed,
                              because after a crash it would count as a version
    lines of versions         the version exists, but its line could not be written
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsl_async.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_async.store.book.book import Book
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.disk.ledger import Ledger
    from fsl_async.store.versions.checkpoint import Checkpoints


class Facts:
    """The durable facts of one open run. Methods raise OSError unchanged."""

    def __init__(self, ledger: Ledger, book: Book, checkpoints: Checkpoints) -> None:
        self.book = book
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._unconfirmed: int | None = None
        self._outstanding: list[VersionRecord] = []

    def record(self, fact: str, members: Mapping[str, Any]) -> None:
        """Make a fact durable, then apply it to the book."""
        self.write_outstanding()
        self.book.apply(self._ledger.append(fact, members))

    def begin_version(self, version: int) -> None:
        """Note that the version's folder may appear; it counts only after `confirm_version`."""
        self._unconfirmed = version

    def confirm_version(self, record: VersionRecord) -> None:
        """Apply a version that exists to the book; `write_outstanding` writes its line."""
        self._unconfirmed = None
        self.book.apply({"fact": "version", **record.to_fact()})
        self._outstanding.append(record)

    def write_outstanding(self) -> None:
        """Remove an unconfirmed version, and write outstanding lines."""
        if self._unconfirmed is not None:
            self._checkpoints.retract(self._unconfirmed)
            self._unconfirmed = None
        while self._outstanding:
            fact = self._ledger.append("version", self._outstanding[0].to_fact())
            self.book.line_written(fact)
            self._outstanding.pop(0)

    def close(self) -> None:
        """Try to write outstanding lines, then release the ledger."""
        if self._outstanding:
            with suppress(OSError, StoreError):
                self.write_outstanding()
        with suppress(OSError):
            self._ledger.close()

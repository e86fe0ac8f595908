"""Ring copy: the state of global rounds, beside the ledger that says it.

    global/ledger.state    one JSON object with a checksum: the ring book
                           (fsl_async.store.ring_book) after its newest fact

A group's cut may be counted by others at any time, and a decision is known to others. So both must
outlive a ledger that is lost, or restored from an older copy: then this file has more facts than
the ledger, and its state becomes a line of it. Otherwise the ledger alone counts. The file is
written after each line, to a temporary name; a write that fails leaves an older one, which counts
for nothing while the ledger is there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.store.ring_book import RingBook

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.files.files import Files

COPY_FILE = "ledger.state"
MAX_COPY_BYTES = 1 << 24


class RingCopy:
    """The file in the folder of global weights."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._path = directory / COPY_FILE
        self._facts = 0
        """Of the book that was read or written last."""

    def load(self) -> RingBook | None:
        """Return the book; None: there is none, or it cannot be read."""
        with suppress(OSError, KeyError, TypeError, ValueError):
            members = from_checksummed(self._files.read_whole(self._path, MAX_COPY_BYTES).rstrip())
            if members is not None:
                book = RingBook.from_json(members["book"])
                self._facts = book.facts
                return book
        return None

    def save(self, book: RingBook) -> None:
        """Write the book if the file has another one. A failure leaves the file as it is."""
        if book.facts == self._facts:
            return
        with suppress(OSError):
            self._files.replace_whole(self._path, to_checksummed({"book": book.to_json()}) + b"\n")
            self._facts = book.facts

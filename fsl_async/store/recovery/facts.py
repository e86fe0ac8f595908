"""Facts: a run's ledger and the book derived from it, kept consistent while the run goes on.

After a failed write, two things may be outstanding, and come before anything else is written:

    an unconfirmed version    its folder may exist although its commit failed: it is removed,
                              because after a crash it would count as a version
    lines of versions         the version exists, but its line could not be written

Ledger state: what a ledger's lines add up to, so that a start reads only the newest ones.

    ledger.state    one JSON object with a checksum (fsl_async.files.checksummed_json): the book
                    (fsl_async.store.book.book) after the first `bytes` of the ledger, and what ties
                    it to that ledger (fsl_async.store.disk.ledger.Position)

It is a cache: nothing is acknowledged by it. Where it is missing, damaged, or not of this ledger,
the whole ledger is read. It is saved when the lines since are `growth` times as long: then a start
reads a few times its size, and one of some dozens of commits pays for it, with few clients and with
many. It is written to a temporary name, so that a crash leaves the old one or the new one; both
fit, because lines are only appended.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import asdict

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.store.book.book import Book
from fsl_async.store.disk.ledger import Position
from fsl_async.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fsl_async.files.files import Files
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.disk.ledger import Ledger
    from fsl_async.store.versions.checkpoint import Checkpoints


STATE_FILE = "ledger.state"
FORMAT = 1
MAX_STATE_BYTES = 256 * 1024 * 1024


class LedgerState:
    """The file beside one ledger."""

    def __init__(self, files: Files, run_dir: Path, growth: float) -> None:
        self._files = files
        self._path = run_dir / STATE_FILE
        self._growth = growth
        # The ledger's length above which a save is due.
        self._enough = 0.0

    def load(self, ledger: Ledger, fits: Callable[[Book], bool]) -> tuple[Book, Position] | str:
        """Return the book and the position after which the ledger must be read.

        fits: whether the book serves. Otherwise returns why the whole ledger must be read: empty
        where there is no state yet.
        """
        try:
            data = self._files.read_whole(self._path, MAX_STATE_BYTES)
        except FileNotFoundError:
            return ""
        except OSError as error:
            data, problem = b"", f"cannot be read ({error.strerror})"
        else:
            problem = "does not match its checksum"
        members = from_checksummed(data.rstrip())
        if members is not None and members.get("format") != FORMAT:
            problem, members = "is of another release", None
        if members is None:
            return problem
        try:
            position = Position(**members["ledger"])
            if not ledger.holds(position):
                return "is not of this ledger"
            book = Book.from_json(members["book"])
        except (KeyError, TypeError, ValueError):
            return "lacks members, or has other ones"
        if not fits(book):
            return "lacks versions that the settings, or --from-version, ask for"
        self._enough = position.bytes + self._growth * len(data)
        return book, position

    def save_if_due(self, ledger: Ledger, book: Book) -> None:
        """Write the book if the ledger has grown enough, or there is no state of use.

        The book must be that of all lines of the ledger. Raises OSError; the old file is then left.
        """
        if ledger.length <= self._enough:
            return
        position = ledger.position()
        members: dict[str, Any] = {
            "format": FORMAT,
            "ledger": asdict(position),
            "book": book.to_json(),
        }
        line = to_checksummed(members) + b"\n"
        self._files.replace_whole(self._path, line)
        self._enough = position.bytes + self._growth * len(line)


class Facts:
    """The durable facts of one open run. Methods raise OSError unchanged."""

    def __init__(
        self, ledger: Ledger, state: LedgerState, book: Book, checkpoints: Checkpoints
    ) -> None:
        self.book = book
        self._ledger = ledger
        self._state = state
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

    def save_state(self) -> None:
        """Save the book for the next start, if that is due."""
        self.write_outstanding()  # the book has these already
        self._state.save_if_due(self._ledger, self.book)

    def close(self) -> None:
        """Try to write outstanding lines, then release the ledger."""
        if self._outstanding:
            with suppress(OSError, StoreError):
                self.write_outstanding()
        with suppress(OSError):
            self._ledger.close()

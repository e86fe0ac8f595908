"""Ledger state: what a ledger's lines add up to, so that a start reads only the newest ones.

    ledger.state    one JSON object with a checksum (fsl_async.files.checksummed_json): the book
                    (fsl_async.store.book) after the first `bytes` of the ledger, and what ties it
                    to that ledger (fsl_async.store.ledger.Position)

It is a cache: nothing is acknowledged by it. Where it is missing, damaged, or not of this ledger,
the whole ledger is read. It is saved when the lines since are `growth` times as long: then a start
reads a few times its size, and one of some dozens of commits pays for it, with few clients and with
many. It is written to a temporary name, so that a crash leaves the old one or the new one; both
fit, because lines are only appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.store.book import Book
from fsl_async.store.ledger import Position

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsl_async.files.files import Files
    from fsl_async.store.ledger import Ledger

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

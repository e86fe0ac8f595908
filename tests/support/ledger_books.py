"""The book of a run directory: by the ledger's state and the lines after it, and by all lines."""

from fsl_async.files.files import Files
from fsl_async.store.book.book import Book
from fsl_async.store.disk.ledger import Ledger
from fsl_async.store.recovery.facts import LedgerState


def book_of_all_lines(run_dir, keep_versions, reuse=0):
    """Return the book of the complete lines; the files are not changed."""
    book = Book(keep_versions, reuse=reuse)
    ledger = Ledger(ReadOnly(), run_dir / "ledger.jsonl", lambda: 0.0)
    ledger.open(book.apply)
    ledger.close()
    return book


def book_by_state(run_dir):
    """Return the same by the state file, or why that is of no use; the files are not changed."""
    found = []
    ledger = Ledger(ReadOnly(), run_dir / "ledger.jsonl", lambda: 0.0)

    def after():
        loaded = LedgerState(ReadOnly(), run_dir, 0.0).load(ledger, lambda _: True)
        is_of_use = not isinstance(loaded, str)
        found.append(loaded[0] if is_of_use else loaded)
        return loaded[1] if is_of_use else None

    ledger.open(
        lambda fact: None if isinstance(found[0], str) else found[0].apply(fact), after=after
    )
    ledger.close()
    return found[0]


def check_state(run_dir):
    """Check that a start by the state and one by all lines are the same; return if there is one."""
    if not (run_dir / "ledger.state").exists():
        return False
    book = book_by_state(run_dir)
    assert isinstance(book, Book), f"the state {book}"
    other = book_of_all_lines(run_dir, book.keep_versions, book.latest.limit)
    # A running store remembers more where a checkpoint or a client needs it.
    kept, book.keep_versions, book.since = book.keep_versions, 0, other.forgotten
    book._forget()
    book.keep_versions = kept
    assert book.to_json() == other.to_json()
    return True


class ReadOnly(Files):
    """A disk that is only read: a torn line is left where it is."""

    def create(self, path):
        """Fail: there is nothing to read."""
        raise FileNotFoundError(path)

    def lock(self, descriptor):
        """Leave the lock to the store that may have it open."""
        return True

    def truncate(self, descriptor, size):
        """Do nothing."""

    def sync(self, descriptor):
        """Do nothing."""

"""Reads CSV so that a stray quote costs one row, not the rest of the file. Pure.

A quote that is never closed makes a field of all that follows. So a row that spans lines counts
only where it is well formed and has as many fields as there are columns. Otherwise its first line
is given up, and reading goes on at the next one. From there until a good row, lines with an odd
number of quotes are given up too: they are what is left of the broken row.

Reading to the end again for each of many broken rows would take the square of a file's length. So
there is an allowance of characters to read again, which grows with those that are done. No row is
looked for that is longer than the rest of it.
"""

import csv
from collections import deque
from collections.abc import Iterator
from typing import Any

from fsl_async.errors import DataError
from fsl_async.learn.tune.chats import UnfitError
from fsl_async.roles.phrasing import counted

DELIMITERS = ",;\t|"
"""Spreadsheets of many countries write semicolons."""


def csv_rows(
    lines: Iterator[tuple[int, str]], name: str, longest: int
) -> Iterator[tuple[int, dict[str, Any] | UnfitError]]:
    """Read (number of its first line, row) from (number from 1, line with its end).

    The first line names the columns, and its separator is the file's. longest: characters of a row.
    Raises DataError where two columns have one name.
    """
    # The limit belongs to the process; it is never lowered for others.
    csv.field_size_limit(max(csv.field_size_limit(), longest))
    first = next(lines, (1, ""))
    delimiter = max(DELIMITERS, key=first[1].count)
    feed = _Feed(lines, longest)
    feed.put([first])
    _, header, _ = _record(feed, delimiter)
    header = [column.strip() for column in header or ()]
    named = [column for column in header if column]
    if not named:
        raise DataError(f"{name!r}, line 1 names no columns")
    if len(set(named)) < len(named):
        raise DataError(f"{name!r}, line 1: two columns have one name")
    mends = False
    while True:
        number, fields, taken = _record(feed, delimiter)
        if not taken:
            return
        if fields is None or (len(taken) > 1 and not _fits(fields, header)):
            feed.put_back(taken[1:])
            mends = True
            yield number, UnfitError("with a stray quote")
        elif mends and taken[0][1].count('"') % 2 and len(taken) == 1:
            yield number, UnfitError("with a stray quote")
        elif fields and not _fits(fields, header):
            yield number, UnfitError(f"with {counted(len(fields), 'field')}")
        elif fields:
            mends = False
            yield number, dict(zip(header, fields, strict=False))


def _fits(fields: list[str], header: list[str]) -> bool:
    """Whether a row has the columns; empty fields at its end are spreadsheets'."""
    return len(fields) >= len(header) and not any(fields[len(header) :])


_ALLOWED, _REGAINED = 8, 4
"""Allowance at first, in longest rows, and its growth with each character that is done."""


class _Feed:
    """Iterates over lines and takes back those of a broken row."""

    def __init__(self, lines: Iterator[tuple[int, str]], longest: int) -> None:
        self._lines, self._longest = lines, longest
        self._allowed = _ALLOWED * longest
        self._back: deque[tuple[int, str]] = deque()
        self.taken: list[tuple[int, str]] = []

    def put_back(self, lines: list[tuple[int, str]]) -> None:
        """Read these lines of a broken row again."""
        self._allowed -= sum(len(text) for _, text in lines)
        self.taken = self.taken[:1]
        self.put(lines)

    def put(self, lines: list[tuple[int, str]]) -> None:
        """Read these lines before the others."""
        self._back.extendleft(reversed(lines))

    def __iter__(self) -> Iterator[str]:
        """Yield lines for one row and keep them in `taken`; stop at the longest row."""
        done = sum(len(text) for _, text in self.taken)
        self._allowed = min(_ALLOWED * self._longest, self._allowed + _REGAINED * done)
        self.taken = []
        size, longest = 0, min(self._longest, self._allowed)
        while size <= longest or not size:
            line = self._back.popleft() if self._back else next(self._lines, None)
            if line is None:
                return
            self.taken.append(line)
            size += len(line[1])
            yield line[1]


def _record(feed: _Feed, delimiter: str) -> tuple[int, list[str] | None, list[tuple[int, str]]]:
    """Read the next row: (number of its first line, fields, lines); fields None: it is broken."""
    reader = csv.reader(iter(feed), delimiter=delimiter, strict=True)
    try:
        fields = next(reader, [])
    except csv.Error:
        return feed.taken[0][0], None, feed.taken
    return (feed.taken[0][0] if feed.taken else 0), fields, feed.taken

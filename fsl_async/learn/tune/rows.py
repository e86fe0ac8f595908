"""Reads rows of files and data sets, streamed: a row is held, or a JSON array. No torch.

    .jsonl .ndjson        an object each line
    .json                 an array of objects, or as .jsonl
    .csv .tsv             the first line names the columns
    .txt                  a text each line; in folders only where nothing else is
    .parquet              needs pyarrow
    a folder of those     in the order of their names; of Parquet also in folders below
    a folder that save_to_disk wrote, and hf://NAME[:CONFIG][:SPLIT]    as of pretraining

Files of text are UTF-8, or UTF-16 and UTF-32 where they begin with its mark; .gz behind the name
is unpacked. Numbers of a column of class labels become their names.

CSV is read so that a stray quote costs one row, not the rest of the file. A quote that is never
closed makes a field of all that follows. So a row that spans lines counts only where it is well
formed, has as many fields as there are columns, and at most `MOST_LINES` lines. Otherwise its first
line is given up, and reading goes on at the next one. From there until a good row, lines with an
odd number of quotes are given up too: they are what is left of the broken row.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from fsl_async.errors import DataError, one_line
from fsl_async.learn.data.dataset import cannot_read
from fsl_async.learn.data.hub import saved_table
from fsl_async.learn.data.sources import (
    ROWS_AT_ONCE,
    Location,
    load_stream,
    open_parquet,
    stream_error,
)
from fsl_async.learn.tune.templates import UnfitError
from fsl_async.roles.phrasing import counted, megabytes

LINE_CHARACTERS = 16 << 20
"""Longest line, field or JSON object; a longer one is damage, or another kind of file."""
ARRAY_CHARACTERS = 1 << 30
"""Longest JSON array, which is read as a whole."""

SUFFIXES = {
    ".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".txt": "text", ".parquet": "parquet",
}  # fmt: skip

_MARKS = {
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # one begins with a mark of UTF-16
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}

Numbered = Iterator[tuple[int, Any]]
"""(number of a line or row from 1, row); instead of a damaged row an UnfitError."""


@attrs.frozen(slots=True)
class Rows:
    """The rows of a file or data set.

    unit: what their numbers count, "line" or "row". read: iterates from the beginning; raises
    DataError.
    """

    path: str
    unit: str
    read: Callable[[], Numbered]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).name or self.path


def open_rows(location: Location) -> tuple[Rows, ...]:
    """Find the files or the data set at a location. Raises DataError where there are none."""
    if location.kind == "hub":
        name = f"hf://{location.path}"
        return (Rows(name, "row", lambda: _streamed(location, name)),)
    path = Path(location.path).expanduser()
    if location.kind == "saved":
        return (Rows(str(path), "row", lambda: _saved(path)),)
    return tuple(_file(each) for each in _files(path))


def _file(path: Path) -> Rows:
    unit = "row" if kind_of(path) in {"json", "parquet"} else "line"
    return Rows(str(path), unit, lambda: _rows(path))


def kind_of(path: Path) -> str:
    """Return the kind of a file by its name, "" where the name has none."""
    name = path.name.lower().removesuffix(".gz")
    return SUFFIXES.get(Path(name).suffix, "")


def _files(path: Path) -> tuple[Path, ...]:
    try:
        if not path.is_dir():
            if not path.is_file():
                raise DataError(
                    f"data {str(path)!r} is neither a file nor a folder: give --data a"
                    f" {' '.join(SUFFIXES)} file, or a folder of them"
                )
            return (path,)
        files = sorted(path.iterdir())
        found = [one for one in files if kind_of(one) and one.is_file()]
        # Beside files of data a .txt file, such as README.txt, is left out.
        found = [one for one in found if kind_of(one) != "text"] or found
        found = found or [one for one in sorted(path.rglob("*.parquet")) if one.is_file()]
    except OSError as error:
        raise cannot_read(path, error) from error
    found = [one for one in found if not one.name.startswith(".")]
    if not found:
        raise DataError(f"folder {str(path)!r} has no {' '.join(SUFFIXES)} files")
    return tuple(found)


def _rows(path: Path) -> Numbered:
    kind = kind_of(path)
    if kind == "parquet":
        yield from _parquet(path)
        return
    try:
        with _opened(path) as text:
            if kind in {"", "json"}:
                # Many .json files hold a JSON object on each line.
                start = text.read(4096).lstrip()[:1]
                text.seek(0)
                kind = {"[": "array", "{": "lines"}.get(start, "")
            if not kind:
                raise DataError(
                    f"{str(path)!r} is no jsonl, JSON array or CSV file: name it .jsonl, .json,"
                    " .csv or .txt"
                )
            yield from _READERS[kind](path, text)
    except (EOFError, zlib.error) as error:
        raise DataError(f"{str(path)!r} is short or damaged ({error}): copy it again") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not {error.encoding.upper()} ({error.reason}): convert it"
        ) from error
    except OSError as error:
        raise cannot_read(path, error) from error


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a file as text. Bytes that are not UTF-8 become surrogates, which `_checked` finds."""
    with ExitStack() as stack:
        source: Any = stack.enter_context(path.open("rb"))
        if source.peek(2)[:2] == b"\x1f\x8b":
            source = stack.enter_context(gzip.GzipFile(fileobj=source))
        start = source.read(4096)
        found = (coding for coding, marks in _MARKS.items() if start.startswith(marks))
        coding = next(found, "utf-8-sig")
        if coding == "utf-8-sig" and b"\0" in start:
            raise DataError(
                f"{str(path)!r} is no text (it holds zero bytes): convert it to UTF-8, or to UTF-16"
                " with its mark"
            )
        source.seek(0)
        errors = "surrogateescape" if coding == "utf-8-sig" else "strict"
        with io.TextIOWrapper(source, coding, errors, newline="") as text:
            yield text


def _checked(text: str, path: Path, line: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{str(path)!r}, line {line} is not UTF-8: convert the file (as iconv does)"
        ) from None
    return text


def _lines(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line with its end)."""
    number = 0
    while line := text.readline(LINE_CHARACTERS + 1):
        number += 1
        if len(line) > LINE_CHARACTERS:
            raise DataError(
                f"{str(path)!r}, line {number} is longer than {megabytes(LINE_CHARACTERS)}:"
                " one row must be on one line"
            )
        yield number, _checked(line, path, number)


def _json_lines(path: Path, text: io.TextIOWrapper) -> Numbered:
    for number, line in _lines(path, text):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, UnfitError("that are no JSON")


def _text_lines(path: Path, text: io.TextIOWrapper) -> Numbered:
    for number, line in _lines(path, text):
        if line.strip():
            yield number, {"text": line.rstrip("\r\n")}


def _json_array(path: Path, stream: io.TextIOWrapper) -> Numbered:
    text = stream.read(ARRAY_CHARACTERS + 1)
    if len(text) > ARRAY_CHARACTERS:
        raise DataError(
            f"{str(path)!r} is an array longer than {megabytes(ARRAY_CHARACTERS)}: make it a .jsonl"
            " file, an object on each line"
        )
    try:
        found = json.loads(_checked(text, path, 1))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is damaged ({one_line(str(error))[:200]})") from error
    yield from enumerate(found, 1)


_READERS: Mapping[str, Callable[[Path, io.TextIOWrapper], Numbered]] = {
    "lines": _json_lines,
    "array": _json_array,
    "csv": lambda path, text: csv_rows(_lines(path, text), str(path), LINE_CHARACTERS),
    "text": _text_lines,
}


# --- csv ---

DELIMITERS = ",;\t|"
"""Spreadsheets of many countries write semicolons."""
MOST_LINES = 1000
"""Lines of a row of CSV at most: those of a broken row are read again."""


class _Table:
    """The rows of a CSV file. taken: lines of the row that was read last."""

    def __init__(self, lines: Iterator[tuple[int, str]], longest: int) -> None:
        first = next(lines, (1, ""))
        self.waiting = deque([first])
        self.taken: list[tuple[int, str]] = []
        self._lines, self._longest = lines, longest
        self._delimiter = max(DELIMITERS, key=first[1].count)

    def _of_a_row(self) -> Iterator[str]:
        size = 0
        while size <= self._longest and len(self.taken) < MOST_LINES:
            line = self.waiting.popleft() if self.waiting else next(self._lines, None)
            if line is None:
                return
            self.taken.append(line)
            size += len(line[1])
            yield line[1]

    def record(self) -> list[str] | None:
        """Read the next row's fields; None: it is broken."""
        self.taken.clear()
        try:
            return next(csv.reader(self._of_a_row(), delimiter=self._delimiter, strict=True), [])
        except csv.Error:
            return None


def csv_rows(
    lines: Iterator[tuple[int, str]], name: str, longest: int
) -> Iterator[tuple[int, dict[str, Any] | UnfitError]]:
    """Read (number of its first line, row) from (number from 1, line with its end).

    The first line names the columns, and its separator is the file's. longest: characters of a row.
    Raises DataError where two columns have one name.
    """
    # The limit belongs to the process; it is never lowered for others.
    csv.field_size_limit(max(csv.field_size_limit(), longest))
    table = _Table(lines, longest)
    header = [column.strip() for column in table.record() or ()]
    named = [column for column in header if column]
    if not named:
        raise DataError(f"{name!r}, line 1 names no columns")
    if len(set(named)) < len(named):
        raise DataError(f"{name!r}, line 1: two columns have one name")
    mends, fields = False, table.record()
    while table.taken:
        (number, text), *others = table.taken
        is_odd = mends and not others and text.count('"') % 2
        # Empty fields at a row's end are spreadsheets'.
        fits = fields is not None and len(fields) >= len(header) and not any(fields[len(header) :])
        if fields is None or (others and not fits) or is_odd:
            table.waiting.extendleft(reversed(others))
            mends = True
            yield number, UnfitError("with a stray quote")
        elif fields and not fits:
            yield number, UnfitError(f"with {counted(len(fields), 'field')}")
        elif fields:
            mends = False
            yield number, dict(zip(header, fields, strict=False))
        fields = table.record()


# --- Arrow and datasets ---


def _parquet(path: Path) -> Numbered:
    with open_parquet(path) as found:
        named = _class_names(found.schema_arrow.metadata)
        yield from _arrow_rows(found.iter_batches(ROWS_AT_ONCE), named)


def _saved(folder: Path) -> Numbered:
    table, _ = saved_table(folder)
    named = _class_names(table.schema.metadata)
    yield from _arrow_rows(table.to_batches(max_chunksize=ROWS_AT_ONCE), named)


def _arrow_rows(batches: Any, named: Mapping[str, list[str]]) -> Numbered:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, _plain(row, named)


def _streamed(location: Location, name: str) -> Numbered:
    try:
        data = load_stream(location)
        features = data.features or {}
        named = {
            column: feature.names
            for column, feature in features.items()
            if hasattr(feature, "names")
        }
        for number, row in enumerate(data, 1):
            yield number, _plain(row, named)
    except Exception as error:  # noqa: BLE001 - the network's, the hub's, the file formats'
        raise stream_error(name, error) from None


def _class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Read the names of class labels by column, which `datasets` writes into Arrow's schema."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        found = {column: one.get("names") for column, one in features.items() if "names" in one}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {column: names for column, names in found.items() if isinstance(names, list)}


def _plain(row: dict[str, Any], named: Mapping[str, list[str]]) -> dict[str, Any]:
    """Replace numbers of class labels by names, and drop empty fields, which Arrow adds."""
    found = {column: _without_empty(value) for column, value in row.items()}
    for column, names in named.items():
        number = found.get(column)
        if isinstance(number, int):
            found[column] = names[number] if 0 <= number < len(names) else None
    return found


def _without_empty(value: Any) -> Any:
    """Drop empty fields: in Arrow all objects of a column have the same fields."""
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one is not None}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value

"""Reads rows of jsonl, JSON and CSV files as samples for fine-tuning. No torch, no NumPy.

    labeled       text and label                                  (classify)
    chat          messages, each with a role and content          (lm)
    completion    a prompt and its completion                     (lm)
    text          text alone                                      (lm)
    preference    a prompt, the chosen and the rejected answer    (dpo)

The first rows of each file decide which of them it holds, among those of the objective. A row that
does not fit is skipped and counted. Files are streamed: no more than a row, or a piece of a JSON
array, is held.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import attrs

from fsl_async.config.settings_tuning import Objective
from fsl_async.errors import DataError, one_line
from fsl_async.learn.data.base import cannot_read
from fsl_async.roles.phrasing import megabytes

LINE_BYTES = 16 << 20
"""Longest line, field or JSON object; a longer one is damage, or another kind of file."""
PIECE_BYTES = 1 << 20
"""Bytes of a JSON array that are read at a time."""
FIRST_ROWS = 20
"""Rows that decide what a file holds."""

SUFFIXES = {
    ".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip

# Names of columns, the usual one first.
_TEXT = ("text", "sentence", "content", "review", "document")
_LABEL = ("label", "target", "class", "category", "sentiment", "labels")
_PROMPT = ("prompt", "instruction", "question", "query", "input")
_COMPLETION = ("completion", "response", "output", "answer")
_MESSAGES = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}

_SPACE = re.compile(r"[ \t\r\n]*")
_GAP = re.compile(r"[ \t\r\n,]*")


@attrs.frozen(slots=True)
class Message:
    """One turn of a chat. role: system, user, assistant, or as the file names it."""

    role: str
    content: str


@attrs.frozen(slots=True)
class Sample:
    """A row. Its shape decides which fields it has.

    messages: of a chat all turns; of a preference the prompt, where it is a chat.
    """

    text: str = ""
    label: int = -1
    prompt: str = ""
    completion: str = ""
    rejected: str = ""
    messages: tuple[Message, ...] = ()


class _UnfitError(Exception):
    """A row does not fit; its text is the reason."""


Row = Mapping[str, Any]


@attrs.frozen(slots=True)
class Columns:
    """What a file holds: shape and columns."""

    shape: str
    text: str = ""
    label: str = ""
    prompt: str = ""
    input: str = ""
    completion: str = ""
    messages: str = ""

    @property
    def described(self) -> str:
        """For people, like "prompt + completion"."""
        if self.shape == "preference":
            return " + ".join(filter(None, (self.prompt, "chosen", "rejected")))
        names = (self.text, self.label, self.prompt, self.input, self.completion, self.messages)
        return " + ".join(filter(None, names))


class Records:
    """The samples under a path, streamed at each iteration.

    path: a file, or a folder whose files are read in the order of their names.
    labels: of classify: their names, in the order of their numbers.

    After an iteration: rows, those that were samples; skipped, those that did not fit; first_skip,
    file, line and reason of the first of them.

    Raises DataError, in one line with file and line: nothing to read, no columns of the objective,
    damage that ends a file, an unknown label, no sample at all.
    """

    def __init__(self, path: str | Path, objective: Objective, labels: Sequence[str] = ()) -> None:
        self.path = Path(path).expanduser()
        self.files = _files(self.path)
        self.name = self.path.name or str(self.path)
        self._objective = objective
        self._labels = {name: number for number, name in enumerate(labels)}
        self.rows = self.skipped = 0
        self.first_skip = ""
        # A file without the right columns is an error before the model is loaded.
        self.columns = self._open(self.files[0])[0]

    def __iter__(self) -> Iterator[Sample]:
        """All samples, in the order of files and rows."""
        self.rows = self.skipped = 0
        self.first_skip = ""
        for path in self.files:
            columns, rows = self._open(path)
            if columns.shape != self.columns.shape:
                raise DataError(
                    f"{str(path)!r} holds {columns.described}, and {self.files[0].name!r}"
                    f" {self.columns.described}: keep files of one kind in a folder"
                )
            for line, row in rows:
                sample = self._sample(path, line, row, columns)
                if sample is not None:
                    self.rows += 1
                    yield sample
        if not self.rows:
            raise DataError(
                f"data {str(self.path)!r}: no row can be used; the first, {self.first_skip}"
            )

    def _open(self, path: Path) -> tuple[Columns, Iterator[tuple[int, Any]]]:
        rows = _rows(path)
        first = list(islice(rows, FIRST_ROWS))
        if not first:
            raise DataError(f"{str(path)!r} holds no rows")
        return recognize(path, [row for _, row in first], self._objective), chain(first, rows)

    def _sample(self, path: Path, line: int, row: Any, columns: Columns) -> Sample | None:
        try:
            return self._read(row, columns)
        except _UnfitError as error:
            self.skipped += 1
            self.first_skip = self.first_skip or f"{path.name}, line {line}: {error}"
            return None
        except DataError as error:
            raise DataError(f"{str(path)!r}, line {line}: {error.message}") from None

    def _read(self, row: Any, columns: Columns) -> Sample:
        if isinstance(row, _UnfitError):
            raise row
        if not isinstance(row, Mapping):
            raise _UnfitError("it is no JSON object")
        if columns.shape == "labeled":
            text = _text(row, columns.text)
            return Sample(text=text, label=self._label(row.get(columns.label), columns.label))
        if columns.shape == "text":
            return Sample(text=_text(row, columns.text))
        if columns.shape == "chat":
            messages = _messages(row.get(columns.messages), columns.messages)
            if all(one.role != "assistant" for one in messages):
                raise _UnfitError(f"no message of {columns.messages} is the assistant's")
            return Sample(messages=messages)
        if columns.shape == "completion":
            prompt = _text(row, columns.prompt, may_be_empty=True)
            more = _text(row, columns.input, may_be_empty=True) if columns.input else ""
            return Sample(
                prompt="\n\n".join(filter(None, (prompt, more))),
                completion=_text(row, columns.completion),
            )
        return _preference(row, columns)

    def _label(self, value: Any, column: str) -> int:
        """The number of a label, given by name or number."""
        if isinstance(value, bool):
            value = str(value).lower()
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or not str(value).strip():
            raise _UnfitError(f"no {column}")
        name = str(value).strip()
        if name in self._labels:
            return self._labels[name]
        if name.isascii() and name.isdigit() and len(name) < 10 and int(name) < len(self._labels):
            return int(name)
        raise DataError(
            f"{column} {name[:80]!r} is not a label of the run (tune.labels):"
            f" {', '.join(self._labels)}, or 0 to {len(self._labels) - 1}"
        )


def recognize(path: Path, rows: Sequence[Any], objective: Objective) -> Columns:
    """Find out what a file holds, from its first rows.

    A column counts where a row has a value in it. Raises DataError where columns that the objective
    needs are missing.
    """
    names = {
        name
        for row in rows
        if isinstance(row, Mapping)
        for name, value in row.items()
        if value not in (None, "")
    }

    def first(known: Iterable[str]) -> str:
        return next((name for name in known if name in names), "")

    text, label, completion = first(_TEXT), first(_LABEL), first(_COMPLETION)
    prompt, messages = first(_PROMPT), first(_MESSAGES)
    if objective == "classify":
        if text and label:
            return Columns("labeled", text=text, label=label)
    elif objective == "dpo":
        if {"chosen", "rejected"} <= names:
            return Columns("preference", prompt=first(("prompt", "question", "instruction")))
    elif messages:
        return Columns("chat", messages=messages)
    elif prompt and completion:
        more = "input" if prompt == "instruction" and "input" in names else ""
        return Columns("completion", prompt=prompt, input=more, completion=completion)
    elif text:
        return Columns("text", text=text)
    seen = ", ".join(sorted(names))[:200] or "no column"
    reasons = (row for row in rows if isinstance(row, _UnfitError))
    why = "" if names else "".join(f" ({reason})" for reason in islice(reasons, 1))
    raise DataError(
        f"{str(path)!r} holds {one_line(seen)}{why}, and {objective} needs {_NEEDED[objective]}:"
        " rename its columns"
    )


_NEEDED: dict[Objective, str] = {
    "lm": "messages, prompt and completion, or text",
    "classify": "text and label",
    "dpo": "prompt, chosen and rejected",
}


def _preference(row: Row, columns: Columns) -> Sample:
    """A prompt and two answers. Answers that are chats hold the prompt, but for the last turn."""
    answers: list[str] = []
    shared: tuple[Message, ...] = ()
    for name in ("chosen", "rejected"):
        value = row.get(name)
        if not isinstance(value, list):
            answers.append(_text(row, name))
            continue
        turns = _messages(value, name)
        if turns[-1].role != "assistant":
            raise _UnfitError(f"{name} does not end with the assistant's message")
        answers.append(turns[-1].content)
        shared = shared or turns[:-1]
    if answers[0] == answers[1]:
        raise _UnfitError("chosen and rejected are equal")
    if isinstance(row.get(columns.prompt), list):
        shared = _messages(row[columns.prompt], columns.prompt)
    prompt = ""
    if columns.prompt and not shared:
        prompt = _text(row, columns.prompt, may_be_empty=True)
    return Sample(prompt=prompt, messages=shared, completion=answers[0], rejected=answers[1])


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value = row.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str) or not (may_be_empty or value.strip()):
        raise _UnfitError(f"no {column}" if value in (None, "") else f"{column} is no text")
    return _encodable(value, column)


def _encodable(text: str, column: str) -> str:
    r"""Return `text`. JSON can hold half a character, like \ud800, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _UnfitError(f"{column} holds half a character") from None
    return text


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    """Turns of a chat: objects with role and content, or from and value."""
    if not isinstance(value, list) or not value:
        raise _UnfitError(f"{column} is no list of messages")
    found = []
    for each in value:
        turn = each if isinstance(each, Mapping) else {}
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise _UnfitError(f"a message of {column} has no role and content in text")
        found.append(Message(_ROLES.get(role, role), _encodable(content, column)))
    return tuple(found)


def _files(path: Path) -> tuple[Path, ...]:
    try:
        if not path.is_dir():
            if not path.is_file():
                raise DataError(
                    f"data {str(path)!r} is neither a file nor a folder: give --data a .jsonl,"
                    " .json or .csv file, or a folder of them"
                )
            return (path,)
        names = sorted(
            one
            for one in path.iterdir()
            if one.suffix.lower() in SUFFIXES and one.is_file() and not one.name.startswith(".")
        )
    except OSError as error:
        raise cannot_read(path, error) from error
    if not names:
        raise DataError(f"folder {str(path)!r} has no {' '.join(SUFFIXES)} files")
    return tuple(names)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, row) of a file; instead of a damaged row an _UnfitError."""
    kind = SUFFIXES.get(path.suffix.lower())
    try:
        if kind is None or kind == "json":
            # Many .json files hold a JSON object on each line.
            start = _SPACE.sub("", _start(path))[:1]
            kind = {"[": "array", "{": "lines"}.get(start)
        if kind is None:
            raise DataError(
                f"{str(path)!r} is no jsonl, JSON array or CSV file: name it .jsonl, .json or .csv"
            )
        yield from _READERS[kind](path)
    except OSError as error:
        raise cannot_read(path, error) from error


def _start(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(4096).removeprefix(codecs.BOM_UTF8).decode("latin-1")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end), decoded one by one."""
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                raise DataError(
                    f"{str(path)!r}, line {number} is longer than {megabytes(LINE_BYTES)}:"
                    " one row must be on one line"
                )
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from error


def _not_utf8(path: Path, number: int, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{str(path)!r}, line {number} is not UTF-8 ({error.reason}): convert it")


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, _UnfitError(f"it is no JSON ({one_line(str(error))})")


def _json_array(path: Path) -> Iterator[tuple[int, Any]]:
    """Objects of an array, of which a piece is held at a time."""
    decode = json.JSONDecoder().raw_decode
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as stream:
        text, at, line, ended = "", 0, 1, False

        def more(count: int) -> None:
            nonlocal text, at, ended
            piece = stream.read(count)
            ended = not piece
            try:
                text, at = text[at:] + decoder.decode(piece, ended), 0
            except UnicodeDecodeError as error:
                raise _not_utf8(path, line, error) from error

        more(PIECE_BYTES)
        at = text.index("[") + 1
        line += text.count("\n", 0, at)
        while True:
            gap = _GAP.match(text, at)
            assert gap is not None
            line += text.count("\n", at, gap.end())
            at = gap.end()
            if at == len(text) and not ended:
                more(PIECE_BYTES)
            elif text[at : at + 1] == "]":
                return
            elif text[at : at + 1] != "{":
                raise DataError(
                    f"{str(path)!r}, line {line}: the array ends too early, or holds other than"
                    " objects"
                )
            else:
                try:
                    row, end = decode(text, at)
                except (ValueError, RecursionError) as error:
                    held = len(text) - at
                    if ended or held > LINE_BYTES or isinstance(error, RecursionError):
                        raise DataError(
                            f"{str(path)!r}, line {line}: the object that begins here is damaged"
                            f" or longer than {megabytes(LINE_BYTES)}"
                        ) from error
                    # Doubling what is held keeps the work for a long object linear.
                    more(max(PIECE_BYTES, held))
                else:
                    yield line, row
                    line += text.count("\n", at, end)
                    at = end


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    lines = (line for _, line in _lines(path))
    head = next(lines, "")
    # Spreadsheets of many countries write semicolons.
    delimiter = max(",;\t", key=head.count)
    # The limit belongs to the process; it is never lowered for others.
    csv.field_size_limit(max(csv.field_size_limit(), LINE_BYTES))
    reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise DataError(f"{str(path)!r}, line 1: two columns have one name")
        number = reader.line_num + 1
        for fields in reader:
            if fields and len(fields) != len(header):
                yield number, _UnfitError(f"{len(fields)} fields, and {len(header)} columns")
            elif fields:
                yield number, dict(zip(header, fields, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{str(path)!r}, the row that ends at line {reader.line_num}: {error};"
            " is a quote missing?"
        ) from error


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    "lines": _json_lines,
    "array": _json_array,
    "csv": _csv_rows,
}

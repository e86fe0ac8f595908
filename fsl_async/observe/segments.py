"""The segments of a journal: they bound a file that is written for months.

`journal.jsonl` is the newest segment. One that has SEGMENT_BYTES becomes `journal.N.jsonl`, N
counting from 1; its successor's first line is a note

    so_far    state, history: the sum of all lines before it, as a `Course` has it

So `fsl-node status` reads the newest segment only. KEPT older ones stay, for people and for the
report of a storm; those before them are deleted. The audit needs of them the keys of acknowledged
deltas: these are in `journal.acknowledged`, one a line.

A segment has its number before its successor takes its name: there is a `journal.jsonl` at every
moment, and a crash in between leaves two names of one file (`tidy`).
"""

import base64
import contextlib
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field
from cattrs.preconf.json import make_converter

from fsl_async.files.files import FILE_MODE, opener

SEGMENT_BYTES = 8 << 20
"""Read in a second: some 50,000 lines."""
KEPT = 127
"""With the newest one a GiB."""
SO_FAR = "so_far"

OPENED = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
"""How a journal is opened."""

FileId = tuple[int, int]
"""Device and number of a file, whatever its name is."""
_ACKNOWLEDGED = ".acknowledged"
_MOST_OF_A_KEY = 1 << 16
_T = TypeVar("_T")
_MOST_OF_A_COLUMN = 1 << 16
"""Bytes: what a note says may be anyone's text."""


class Column(list[float]):
    """Numbers over time. A note has them as doubles, compressed, in base64: there are many."""


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text), _MOST_OF_A_COLUMN)
    except zlib.error as error:
        raise ValueError(f"not a column: {error}") from None


def _column(text: str, _: Any) -> Column:
    data = _unpacked(text)
    return Column(struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8]))


_converter = make_converter(detailed_validation=False)  # errors are the plain ones
_converter.register_unstructure_hook(
    Column, lambda column: _packed(struct.pack(f"<{len(column)}d", *column))
)
_converter.register_structure_hook(Column, _column)
_converter.register_unstructure_hook(bytearray, _packed)
_converter.register_structure_hook(bytearray, lambda text, _: bytearray(_unpacked(text)))
_converter.register_unstructure_hook(
    float, lambda value: value if math.isfinite(value) else str(value)
)


@define
class Total:
    """What the next segment keeps of those before it."""

    sum: Any
    """An attrs object that `apply` adds lines to; its fields are those of the note."""
    acknowledged: dict[str, None] = field(factory=dict)
    """Keys of deltas, of the lines that were added."""

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take lines, in order."""
        for line in lines:
            self.sum.apply(line)
            key = acknowledged_key(line)
            if key is not None:
                self.acknowledged[key] = None

    def as_fields(self) -> dict[str, Any]:
        """Of the note so_far."""
        return dict(_converter.unstructure(self.sum))


def restored(kind: type[_T], found: Any) -> _T:
    """A part of a note so_far. Raises KeyError, TypeError, ValueError or AttributeError."""
    return _converter.structure(found, kind)


def acknowledged_key(line: Mapping[str, Any]) -> str | None:
    """The key of a delta, in a line about its acknowledgement at the parameter server or a
    client.
    """
    message = line.get("message")
    if line.get("type") == "send" and isinstance(message, dict):
        return str(message.get("key")) if message.get("type") == "accepted/1" else None
    return str(line.get("key")) if line.get("type") == "accepted" else None


ACKNOWLEDGING = (b'"accepted/1"', b'"type":"accepted"')
"""In lines that have an `acknowledged_key`, and few others."""


def acknowledged_before(path: Path) -> Iterator[str]:
    """Keys of the older segments of the journal `path`, deleted ones too; not a torn last key."""
    with contextlib.suppress(FileNotFoundError), path.with_suffix(_ACKNOWLEDGED).open("rb") as file:
        yield from (line[:-1].decode(errors="replace") for line in file if line.endswith(b"\n"))


def turn(path: Path, first: bytes, acknowledged: Iterable[str]) -> int:
    """Make the journal `path` an older segment and begin a new one; returns that, open.

    first: its first line. Raises OSError, and all is as it was.
    """
    older = _numbered(path)
    new = _new(path)
    # Opened first: once it has its name nothing may fail, or lines would go into the old file.
    file = os.open(new, OPENED | os.O_TRUNC, FILE_MODE)
    try:
        new.write_bytes(first)
        path.with_suffix(f".{max(older, default=0) + 1}{path.suffix}").hardlink_to(path)
        _keep(path.with_suffix(_ACKNOWLEDGED), acknowledged)
        new.replace(path)
    except OSError:
        os.close(file)
        tidy(path)
        raise
    for number in sorted(older)[: -(KEPT - 1) or None]:
        with contextlib.suppress(OSError):
            older[number].unlink()
    return file


def _keep(path: Path, keys: Iterable[str]) -> None:
    """Add keys behind the last whole one: half a key and another would make a wrong one."""
    with open(path, "ab+", opener=opener) as file:
        file.seek(-min(file.tell(), _MOST_OF_A_KEY), os.SEEK_END)
        tail = file.read()
        file.truncate(file.tell() - len(tail) + tail.rfind(b"\n") + 1)
        file.write("".join(f"{key}\n" for key in keys).encode(errors="replace"))


def tidy(path: Path) -> None:
    """Take back what a process that died in `turn`, or an error, has left."""
    with contextlib.suppress(OSError):
        _new(path).unlink(missing_ok=True)
        for older in _numbered(path).values():
            if older.samefile(path):
                older.unlink()


def between(path: Path, first: FileId, newest: FileId) -> list[Path]:
    """The older segments from `first` to `newest`, oldest first; none for an unknown `first`."""
    older = [(_id_of(one), one) for one in _in_order(path)]
    for place, (found, _) in enumerate(older):
        if found == first:
            return [one for found, one in older[place:] if found != newest]
    return []


def oldest(path: Path) -> FileId | None:
    """The oldest segment that is kept."""
    return _id_of(next(iter(_in_order(path)), path))


def _id_of(path: Path) -> FileId | None:
    try:
        about = path.stat()
    except FileNotFoundError:  # deleted just now
        return None
    return about.st_dev, about.st_ino


def _in_order(path: Path) -> list[Path]:
    found = _numbered(path)
    return [found[number] for number in sorted(found)]


def _numbered(path: Path) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d{{1,9}}){re.escape(path.suffix)}")
    names = ((one, pattern.fullmatch(one.name)) for one in path.parent.iterdir())
    return {int(match[1]): one for one, match in names if match}


def _new(path: Path) -> Path:
    return path.with_suffix(f"{path.suffix}.new")

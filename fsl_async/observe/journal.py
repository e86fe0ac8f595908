"""The journal: every event, effect and fact of a run with its cause, one JSON object a line.

`journal_lines` has the format. The same run gives the same bytes but for `t`; `TraceHash` is
SHA-256 over its lines without `t`, for the simulator.

A full disk never stops a run, and a slow one never holds its loop: a thread writes. Lines that
cannot be written, or that find `MAX_WAITING_BYTES` waiting, are counted, and a note "journal_gap"
has their number once there is space again; its `n` is that of the first of them.

A journal does not grow without end: a full one is put aside, and its successor begins with the sum
of all before it (`segments`).
"""

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

from attrs import define

from fsl_async.files.files import FILE_MODE, make_folder
from fsl_async.observe import segments
from fsl_async.observe.history import Course
from fsl_async.observe.journal_lines import (
    body_of,
    encode,
    fact_fields,
    line_of,
    note_body,
    read_line,
)

JOURNAL = "journal.jsonl"
"""A node's journal, in its run directory."""

FLUSH_EVERY_S = 1.0
MAX_WAITING_BYTES = 16 << 20
"""Of lines that a slow disk has not taken: minutes of a busy server."""

_BUFFER_BYTES = 1 << 16
_TAIL_BYTES = 1 << 20


def _trace_of(item: Any) -> str:
    """The text of an event or effect, the same in each process."""
    text = repr(item)
    # A set's order changes from process to process, so there the sorted form of the journal stands.
    return "".join(body_of(item)) if "set(" in text else text


class TraceHash:
    """All events, effects and notes, hashed: two runs are the same when the digests are."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.sha256()

    def event(self, item: Any, now: float, cause: int | None = None) -> int:
        """Add an event; returns its number, the cause of what follows from it."""
        return self._add("event", _trace_of(item), now, cause)

    def effect(self, item: Any, now: float, cause: int | None = None) -> int:
        """Add an effect."""
        return self._add("effect", _trace_of(item), now, cause)

    def fact(self, item: Any, now: float, cause: int | None = None) -> int:
        """Leave a fact out: it follows from events and effects."""
        return self.count

    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int:
        """Add a note."""
        return self._add("note", name + note_body(fields), now, cause)

    def hexdigest(self) -> str:
        """SHA-256 over all lines so far, in hexadecimal."""
        return self._hash.hexdigest()

    def _add(self, kind: str, text: str, now: float, cause: int | None) -> int:
        n = self.count
        self.count = n + 1
        self._hash.update(f"{n} {now!r} {kind} {cause} {text}\n".encode(errors="replace"))
        return n

    def flush(self) -> None:
        """Nothing to do; here so that a shell need not know which of the two it has."""

    def close(self) -> None:
        """Nothing to do."""


@define
class _Waiting:
    """A line that is not written yet, or the place of `lost` ones, of which a line will tell.

    n: the number of the line, or of the first that is lost.
    """

    n: int
    text: str = ""
    lost: int = 0


class JournalWriter:
    """Appends to a journal file. For any thread; waits for the disk in `flush` and `close` only.

    A daemon thread writes, within `FLUSH_EVERY_S` or when there is a block. An existing file is
    continued: numbers go on, and a last line torn by a crash is closed off. Opening raises OSError;
    writing never does.

    clock: wall-clock seconds. sum_up: makes the state that adds lines up for the next segment's
    first line; None: all in one file, however long.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        sum_up: Callable[[], Course] | None = Course,
    ) -> None:
        self.path = path
        self._sum_up = sum_up
        self._turns_at = segments.SEGMENT_BYTES
        self.lines_lost = 0
        self._clock = clock
        make_folder(path.parent)
        if sum_up is not None:
            segments.tidy(path)
        self._file = os.open(path, segments.OPENED, FILE_MODE)
        self.count, self._torn = _resume(self._file)
        self._lines: list[_Waiting] = []
        self._bytes = 0
        self._now = 0.0
        self._lock = threading.Lock()  # the lines and the numbers; held for moments
        self._writing = threading.Lock()  # the file
        self._wake = threading.Event()
        self._soon = threading.Event()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_often, name="journal", daemon=True)
        self._flusher.start()

    def event(self, item: Any, now: float, cause: int | None = None) -> int:
        """Write an event; `cause` is the effect it ends. Returns its number, for its effects."""
        name, body = body_of(item)
        return self._add(now, "event", name, cause, body)

    def effect(self, item: Any, now: float, cause: int | None = None) -> int:
        """Write an effect that the event `cause` led to."""
        name, body = body_of(item)
        return self._add(now, "effect", name, cause, body)

    def fact(self, item: Any, now: float, cause: int | None = None) -> int:
        """Write what a machine has decided, in full: other values of a line are made small."""
        return self._add(now, "fact", item.tag, cause, "," + encode(fact_fields(item))[1:-1])

    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int:
        """Write what is neither event nor effect; `name` is like a tag, such as node_started."""
        return self._add(now, "note", name, cause, note_body(fields))

    def flush(self) -> None:
        """Hand everything to the operating system: a kill -9 loses no line written before."""
        with self._writing:
            with self._lock:
                waiting = self._taken()
            if waiting and self._file >= 0:
                self._write(waiting)

    def close(self) -> None:
        """Flush and close; further lines are ignored. Harmless when closed already."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._soon.set()
        self._wake.set()
        self._flusher.join()
        self.flush()
        with self._writing:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, now: float, kind: str, name: str, cause: int | None, body: str) -> int:
        with self._lock:
            n = self.count
            self.count = n + 1
            self._now = now
            head = f'"n":{n},"t":{self._clock():.6f},"now":{now!r}'
            line = line_of(head, kind, name, cause, body)
            if self._bytes + len(line) > MAX_WAITING_BYTES:
                self.lines_lost += 1
                if not (self._lines and self._lines[-1].lost):
                    self._lines.append(_Waiting(n))
                self._lines[-1].lost += 1
                return n
            if not self._wake.is_set():
                self._wake.set()
            self._lines.append(_Waiting(n, line))
            self._bytes += len(line)
            if self._bytes >= _BUFFER_BYTES:
                self._soon.set()
            return n

    def _taken(self) -> list[_Waiting]:
        """Take the waiting lines; lost ones are replaced by a note. The caller holds both locks."""
        taken, self._lines, self._bytes = self._lines, [], 0
        self._soon.clear()
        for one in taken:
            if one.lost:
                head = f'"n":{one.n},"t":{self._clock():.6f},"now":{self._now!r}'
                body = note_body({"lines": one.lost})
                one.text = line_of(head, "note", "journal_gap", None, body)
        return taken

    def _write(self, waiting: list[_Waiting]) -> None:
        """Write lines; of those that the disk did not take, a later line tells."""
        start = b"\n" if self._torn else b""
        data = start + "".join(one.text for one in waiting).encode(errors="replace")
        done = 0
        try:
            while done < len(data):
                done += self._put(data[done:])
        except OSError:
            if done:
                self._torn = data[done - 1] != ord("\n")
            left = waiting[max(0, data[:done].count(b"\n") - len(start)) :]
            with self._lock:
                self.lines_lost += sum(not one.lost for one in left)
                lost = sum(one.lost or 1 for one in left)
                self._lines.insert(0, _Waiting(left[0].n, lost=lost))
            return
        self._torn = False

    def _put(self, data: bytes) -> int:
        """The only call that adds to the file: how many bytes it took. Raises OSError."""
        return os.write(self._file, data)

    def _flush_often(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            if not self._closing.is_set():
                self._soon.wait(FLUSH_EVERY_S * 0.9)
            self._wake.clear()
            self.flush()
            if self._sum_up is not None and os.fstat(self._file).st_size >= self._turns_at:
                try:
                    self._turn(segments.Total(self._sum_up()))
                except Exception:  # noqa: BLE001
                    # A full disk, a file system without links: a long journal is better than none.
                    self._turns_at = os.fstat(self._file).st_size * 3 // 2

    def _turn(self, total: segments.Total) -> None:
        """Put the file aside and go on in a new one. On the writing thread."""
        reader = JournalReader(self.path)
        total.add(itertools.takewhile(lambda _: not self._closing.is_set(), reader.read()))
        if self._closing.is_set():  # nobody waits for this: the next process does it
            return
        with self._writing:
            with self._lock:
                waiting = self._taken()
                n, self.count = self.count, self.count + 2
                head = f'"n":{n},"t":{self._clock():.6f},"now":{self._now!r}'
            if waiting:  # with lower numbers than the new segment's first line
                self._write(waiting)
            total.add(reader.read())  # what came meanwhile
            body = "," + encode(total.as_fields())[1:-1]
            first = line_of(head, "note", segments.SO_FAR, None, body).encode(errors="replace")
            file = segments.turn(self.path, first, total.acknowledged)
            os.close(self._file)
            self._file, self._torn = file, False
            with self._lock:
                if self._lines and self._lines[0].lost and self._lines[0].n < n:
                    # Of lines that the old segment did not take, and of which the new one tells.
                    self._lines[0].n = n + 1
            self._turns_at = len(first) + segments.SEGMENT_BYTES


def _resume(file: int) -> tuple[int, bool]:
    """Next number for an existing journal, and whether its last line is torn."""
    size = os.fstat(file).st_size
    length = _TAIL_BYTES
    while True:
        tail = os.pread(file, length, max(0, size - length))
        for line in reversed(tail.split(b"\n")):
            found = read_line(line)
            if found is not None and isinstance(found.get("n"), int):
                return int(found["n"]) + 1, not tail.endswith(b"\n")
        if length >= min(size, segments.SEGMENT_BYTES):
            return 0, bool(tail) and not tail.endswith(b"\n")
        length *= 8  # the first line of a segment may be long


class JournalReader:
    """Reads a journal, also while another process writes it. Never holds more than a block of it.

    It begins with the newest segment, whose first line has the sum of those before; `read_all`
    reads every line that is kept. `damaged` counts lines that are not JSON objects (torn by a
    crash). A last line without its line break is not complete yet: it is left for the next call.

    having: skip lines that contain none of these; may be set while lines are read.
    """

    def __init__(self, path: Path, having: tuple[bytes, ...] = ()) -> None:
        self.path = path
        self.damaged = 0
        self.having = having
        self._offset = 0
        self._file_id = (-1, -1)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that are new since the last call. Raises OSError without a file.

        A file that has become an older segment is read to its end first. One that was replaced or
        cut short is read from its start.
        """
        with self.path.open("rb") as file:
            about = os.fstat(file.fileno())
            file_id = (about.st_dev, about.st_ino)
            if file_id != self._file_id:
                for path in segments.between(self.path, self._file_id, file_id):
                    with contextlib.suppress(FileNotFoundError), path.open("rb") as older:
                        yield from self._lines(older)
                    self._offset = 0
            if file_id != self._file_id or about.st_size < self._offset:
                self._file_id, self._offset = file_id, 0
            yield from self._lines(file)

    def read_all(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of all segments that are kept, from the oldest on. Raises OSError."""
        self._file_id, self._offset = segments.oldest(self.path) or (-1, -1), 0
        yield from self.read()

    def _lines(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            if self.having and not any(word in line for word in self.having):
                continue
            found = read_line(line)
            if found is not None:
                yield found
            elif line.strip():
                self.damaged += 1

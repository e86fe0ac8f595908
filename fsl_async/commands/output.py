"""Prints a command's output. With --json every line of standard output is one JSON object.

The result is the last line. A node must survive a terminal or pipe that is gone or not read:
writing never raises and, for a node, never waits. Text that cannot be written is dropped.

Control and format characters are escaped here, in every line and in JSON, so no text acts on the
terminal. Text of peers is made printable on arrival; a journal may come from elsewhere.

The reader of a node's output may be slow, stopped (Ctrl-S) or missing. Lines queue in memory, and a
thread that exists only that long writes them, before the call returns where there is room. Beyond
`LIMIT_BYTES` the newest lines are dropped, and one line reports how many. A process that ends waits
at most `END_S` for its queued lines. The rest is dropped, and nothing more is written to that
reader, because it would continue a line that was written in part.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import stat
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, TextIO

import attrs

from fsl_async.accounting.sizes import account_lines
from fsl_async.errors import printable
from fsl_async.roles.phrasing import megabytes

LIMIT_BYTES: Final = 1 << 20
"""Bytes of queued lines at most."""
AT_ONCE_S: Final = 0.02
"""The first line of a queue waits so long for the reader, so that streams keep their order."""
END_S: Final = 3.0
"""At the end of a process: the wait for all readers together."""
_RETRY_S: Final = 0.02

_streams: weakref.WeakSet[LineStream] = weakref.WeakSet()


def silence(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null; else the interpreter reports it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def finish_all(limit_s: float = END_S) -> None:
    """Wait, at most `limit_s` in all, until the queued lines of all streams are written."""
    end_at = time.monotonic() + limit_s
    for lines in list(_streams):
        lines.finish(max(0.0, end_at - time.monotonic()))


atexit.register(finish_all)


def write_last(stream: TextIO, text: str) -> None:
    """Write a process's last lines, after all queued ones, without blocking forever."""
    finish_all()
    if text:
        lines = LineStream(stream)
        lines.write(text)
        lines.finish()


class LineStream:
    """Writes text to a stream. Thread-safe; never raises."""

    def __init__(
        self, stream: TextIO, *, waits: bool = False, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """waits: block until text is written; else drop what the reader does not take."""
        self.dropped = 0
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_gone = False
        self._file = -1
        # A file, or a test's buffer, always has room.
        with contextlib.suppress(OSError, ValueError):
            if not waits and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                self._file = stream.fileno()
                _streams.add(self)

    def write(self, text: str) -> None:
        """Write text, or queue it, or drop it."""
        coding = getattr(self._stream, "encoding", None) or "utf-8"
        # A path that is not UTF-8, or a terminal of another encoding: escape characters.
        data = text.encode(coding, "backslashreplace")
        if self._file < 0:
            try:
                self._stream.write(data.decode(coding))
                self._stream.flush()
            except (OSError, ValueError):
                silence(self._stream)
            return
        with self._lock:
            is_full = self._queue and self._queued_bytes + len(data) > self._limit_bytes
            if is_full or self._is_gone:
                self.dropped += 1
                return
            self._queue.append(data)
            self._queued_bytes += len(data)
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._drain, name="output", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there is no room for a thread: the next line tries again
                return
            self._thread = thread
        thread.join(AT_ONCE_S)

    def finish(self, limit_s: float = END_S) -> None:
        """Wait at most `limit_s` for queued lines, then write no more to that reader."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return
        thread.join(limit_s)
        if thread.is_alive():
            with contextlib.suppress(OSError):
                reader = os.fstat(self._file)
                for lines in list(_streams):
                    lines.give_up(reader)

    def give_up(self, reader: os.stat_result) -> None:
        """Write no more, if this stream has that reader; it may be shared (`2>&1`)."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file), reader):
                self._is_gone = True
                silence(self._stream)

    def _drain(self) -> None:
        """Write until the queue is empty; the body of the thread."""
        while True:
            with self._lock:
                if self.dropped and not self._queue:
                    notice = f"({self.dropped} lines were dropped here because they were not read)"
                    self._queue.append(f"{notice}\n".encode())
                    self._queued_bytes, self.dropped = len(self._queue[0]), 0
                if not self._queue or self._is_gone:
                    self._thread = None
                    return
                data = self._queue[0]
            self._write(data)
            with self._lock:
                self._queued_bytes -= len(self._queue.popleft())

    def _write(self, data: bytes) -> None:
        while data and not self._is_gone:
            try:
                data = data[os.write(self._file, data) :]
            except BlockingIOError:  # another process has made it so
                time.sleep(_RETRY_S)
            except OSError:  # the reader is gone
                self._is_gone = True
                silence(self._stream)


_TITLES = {"ps": "parameter server", "server": "split server"}


class Output:
    """Prints for one command."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        waits: bool = True,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """waits: block until each line is written; False for nodes, which drop lines instead."""
        self.as_json = as_json
        self._out = LineStream(sys.stdout if out is None else out, waits=waits)
        self._err = LineStream(sys.stderr if err is None else err, waits=waits)

    def say(self, *lines: str) -> None:
        """Print text, one line each; with --json on standard error."""
        text = "\n".join(map(printable, lines))
        (self._err if self.as_json else self._out).write(f"{text}\n")

    def answer(self, values: Any, *lines: str) -> None:
        """Print the result: `values` as one JSON object with --json, else `lines` as text."""
        if self.as_json:
            self.result(values)
        else:
            self.say(*lines)

    def part(self, text: str) -> None:
        """Print a part of a text, with its line breaks and tabs; nothing with --json."""
        if not self.as_json:
            self._out.write("".join(one if one in "\n\t" else printable(one) for one in text))

    def note(self, text: str) -> None:
        """Print a line of a node; with --json a record of it."""
        if self.as_json:
            self.record("note", text=text)
        else:
            self.say(text)

    def warn(self, text: str) -> None:
        """Print a warning, on standard error."""
        self._err.write(f"warning: {printable(text)}\n")

    def record(self, event: str, /, **fields: Any) -> None:
        """Print one JSON object `{"event": ...}`; nothing without --json."""
        if self.as_json:
            self._out.write(encoded({"event": event, **fields}) + "\n")

    def result(self, summary: Any) -> None:
        """Print the result, an attrs object or a dict: one JSON object, or aligned lines.

        For people a node's byte counters are a table, and a nested object is a paragraph.
        """
        values: dict[str, Any] = (
            attrs.asdict(summary) if attrs.has(type(summary)) else dict(summary)
        )
        if self.as_json:
            self._out.write(encoded(values) + "\n")
            return
        for line in _lines(values):
            self._out.write(f"{printable(line)}\n")


def encoded(values: Any) -> str:
    """Encode as one line of JSON.

    NaN and infinity (a loss that diverged) become null, because strict readers refuse them.
    """
    try:
        line = json.dumps(values, default=str, allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(values), default=str, allow_nan=False)
    return line.replace("\x7f", "\\u007f")  # the only ASCII control character JSON does not escape


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(values: Mapping[str, Any]) -> list[str]:
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    if plain.get("version") == -1:  # the run ended before its first version
        plain["version"] = None
    width = max((len(name) for name in plain), default=0)
    lines = [f"{name.replace('_', ' '):{width}}  {_shown(name, plain[name])}" for name in plain]
    for name, value in values.items():
        if not isinstance(value, Mapping):
            continue
        if value.keys() >= {"payload", "coded", "sockets", "error"}:
            lines += account_lines("node", value)
        else:
            lines += ["", f"{_TITLES.get(name, name.replace('_', ' '))}:", *_lines(value)]
    return lines


def _shown(name: str, value: Any) -> str:
    is_size = name == "memory_grown" or name.endswith("_bytes")
    return megabytes(value) if is_size and type(value) is int else _readable(value)


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, default=str)

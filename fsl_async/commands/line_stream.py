"""Writes a node's output without waiting for its reader.

The reader may be slow, stopped (Ctrl-S) or missing. A line is written at once where there is room.
Lines that meet a full pipe or terminal queue in memory, and a thread that exists only that long
writes them when there is room again. Beyond `LIMIT_BYTES` the newest lines are dropped, and one
line reports how many.

A process that ends waits at most `END_S` for its queued lines, and at most `PATIENCE_S` for a
reader that takes nothing. The rest is dropped, and nothing more is written to that stream, because
it would continue a line that was written in part.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import stat
import threading
import time
import weakref
from collections import deque
from typing import Final, TextIO

from fsl_async.process.terminal import open_anew

LIMIT_BYTES: Final = 1 << 20
"""Bytes of queued lines at most."""
ATOMIC_BYTES: Final = 512
"""Bytes that fit into a pipe when poll(2) reports room: POSIX's least PIPE_BUF.

They may not fit into a terminal; see `fsl_async.process.terminal`.
"""
PATIENCE_S: Final = 2.0
"""At the end of a process: the wait for a reader that takes nothing."""
END_S: Final = 5.0
"""At the end of a process: the wait for all readers together."""
_POLL_S: Final = 0.5
_RETRY_S: Final = 0.02

_streams: weakref.WeakSet[LineStream] = weakref.WeakSet()


def silence(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null; else the interpreter reports it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def silence_when_full(stream: TextIO, patience_s: float = PATIENCE_S) -> None:
    """Redirect a stream that has no room within `patience_s` to /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if not poll.poll(patience_s * 1000):
            silence(stream)


def finish_all(limit_s: float = END_S) -> None:
    """Wait, at most `limit_s` in all, until the queued lines of all streams are written."""
    end_at = time.monotonic() + limit_s
    for lines in list(_streams):
        lines.finish(max(0.0, end_at - time.monotonic()))


def write_last(stream: TextIO, text: str) -> None:
    """Write a process's last lines, after all queued ones, without blocking forever.

    text: ends with a newline, or is empty.
    """
    finish_all()
    silence_when_full(stream)
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    if text:
        lines = LineStream(stream)
        lines.write(text.removesuffix("\n"))
        lines.finish(PATIENCE_S)


class LineStream:
    """Writes lines to a text stream. Thread-safe; never raises, and waits in `finish` only."""

    def __init__(
        self, stream: TextIO, *, limit_bytes: int = LIMIT_BYTES, patience_s: float = PATIENCE_S
    ) -> None:
        self.dropped = 0
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._moved_at = 0.0
        self._gave_up = False
        self._file = -1
        self._may_block = False
        self._inode = (0, 0)
        with contextlib.suppress(OSError, ValueError):
            file = stream.fileno()
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                self._open(file)
                self._inode = (found.st_dev, found.st_ino)
        _streams.add(self)

    def _open(self, file: int) -> None:
        self._file = file
        if os.isatty(file):
            reopened = open_anew(file)
            if reopened is None:
                self._may_block = True
                return
            self._file = reopened
            # Not at exit: `finish_all` still writes then.
            weakref.finalize(self, os.close, reopened).atexit = False

    def write(self, text: str) -> None:
        """Write a line, or queue it, or drop it."""
        if self._file < 0:  # a file, or a test's buffer: there is always room
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                silence(self._stream)
            return
        data = (text + "\n").encode(self._stream.encoding or "utf-8", "backslashreplace")
        with self._lock:
            is_full = self._queue and self._queued_bytes + len(data) > self._limit_bytes
            if is_full or self._gave_up:
                self.dropped += 1
                return
            self._queue.append(data)
            self._queued_bytes += len(data)
            if self._thread is not None:
                return
            while not self._may_block and self._queue and self._room(0.0):
                if not self._advance(self._write(self._queue[0])):
                    break
            if self._queue:
                self._moved_at = time.monotonic()
                self._thread = threading.Thread(target=self._drain, name="output", daemon=True)
                self._thread.start()

    def finish(self, limit_s: float = END_S) -> None:
        """Wait at most `limit_s`, while the reader takes queued lines; then drop the rest."""
        begun = self._moved_at = time.monotonic()
        while not self._gave_up:
            with self._lock:
                thread = self._thread
            if thread is None:
                return
            thread.join(_RETRY_S)
            now = time.monotonic()
            if now - begun > limit_s or now - self._moved_at > self._patience_s:
                for lines in list(_streams):
                    lines.give_up(self._inode)

    def give_up(self, inode: tuple[int, int]) -> None:
        """Write no more, if this stream has that reader; it may be shared (`2>&1`)."""
        if inode == self._inode:
            self._gave_up = True
            silence(self._stream)

    def _room(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        return bool(poll.poll(wait_s * 1000))

    def _write(self, line: bytes) -> int:
        """Write the start of a line where there is room; returns the bytes that are done."""
        try:
            return os.write(self._file, line[:ATOMIC_BYTES])
        except BlockingIOError:
            return 0
        except OSError:  # the reader is gone
            silence(self._stream)
            return len(line)

    def _advance(self, taken: int) -> bool:
        """Remove `taken` bytes of the first line, with the lock held; whether there were any."""
        line = self._queue.popleft()
        self._queued_bytes -= taken
        if taken < len(line):
            self._queue.appendleft(line[taken:])
        elif not self._queue and self.dropped:
            notice = f"({self.dropped} lines were dropped here because they were not read)\n"
            self.dropped = 0
            self._queue.append(notice.encode())
            self._queued_bytes += len(notice)
        if taken:
            self._moved_at = time.monotonic()
        return taken > 0

    def _drain(self) -> None:
        """Write whenever there is room, until the queue is empty; the body of the thread.

        It writes without the lock, because a terminal may block it.
        """
        while True:
            has_room = self._room(_POLL_S) and not self._gave_up
            taken = self._write(self._queue[0]) if has_room else 0
            with self._lock:
                if has_room:
                    self._advance(taken)
                if not self._queue or self._gave_up:
                    self._thread = None
                    return
            if has_room and not taken:  # less room than the next character needs
                time.sleep(_RETRY_S)


atexit.register(finish_all)

"""Lines for whoever reads a node's output, who may be slow, stopped (Ctrl-S), or never there: writing never waits for them.

A line is written at once where there is room. What finds a full pipe or terminal waits in memory, and a thread that lives only that long
writes it when there is room again; beyond `LIMIT_BYTES` the newest lines are dropped, and one line says how many.

A process that ends gives the reader `END_S` for what waits, and only `PATIENCE_S` where the reader takes nothing. What is left then is
dropped, and nothing more is said there: it would stand inside a line that was written by half.
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
"""Of lines that wait."""
ATOMIC_BYTES: Final = 512
"""So much fits into a pipe where poll(2) says that there is room: POSIX's least PIPE_BUF. Not into a terminal; see `fsl_async.process.terminal`."""
PATIENCE_S: Final = 2.0
"""At the end of a process: so long for a reader that takes nothing."""
END_S: Final = 5.0
"""At the end of a process: so long for all readers together, however much they take."""
_LOOK_EVERY_S: Final = 0.5
_AGAIN_S: Final = 0.02

_streams: weakref.WeakSet[LineStream] = weakref.WeakSet()


def silence(stream: TextIO) -> None:
    """Point a broken stream at nothing, or the interpreter complains about it once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def silence_when_full(stream: TextIO, patience_s: float = PATIENCE_S) -> None:
    """Before the last words of a process: nobody can be told where nobody reads, and it must end all the same."""
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if not poll.poll(patience_s * 1000):
            silence(stream)


def finish_all(limit_s: float = END_S) -> None:
    """Wait for the lines that wait anywhere, all together not longer than the limit. What is said at the end of a process."""
    end_at = time.monotonic() + limit_s
    for lines in list(_streams):
        lines.finish(max(0.0, end_at - time.monotonic()))


def last_words(stream: TextIO, text: str) -> None:
    """Write what a process says last: behind all lines that wait, and not for ever. `text` ends with a line's end, or is empty."""
    finish_all()
    silence_when_full(stream)
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    if text:
        lines = LineStream(stream)
        lines.write(text.removesuffix("\n"))
        lines.finish(PATIENCE_S)


class LineStream:
    """Writes lines to a text stream. Callable from any thread; never raises, never waits but in `finish`."""

    def __init__(
        self, stream: TextIO, *, limit_bytes: int = LIMIT_BYTES, patience_s: float = PATIENCE_S
    ) -> None:
        self.dropped = 0
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
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
            anew = open_anew(file)
            if anew is None:
                self._may_block = True
                return
            self._file = anew
            # Not at exit: `finish_all` still writes then.
            weakref.finalize(self, os.close, anew).atexit = False

    def write(self, text: str) -> None:
        """Write a line, or have it wait, or drop it."""
        if self._file < 0:  # a file, or a test's buffer: there is always room
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                silence(self._stream)
            return
        data = (text + "\n").encode(self._stream.encoding or "utf-8", "backslashreplace")
        with self._lock:
            is_full = self._waiting and self._waiting_bytes + len(data) > self._limit_bytes
            if is_full or self._gave_up:
                self.dropped += 1
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._thread is not None:
                return
            while not self._may_block and self._waiting and self._room(0.0):
                if not self._took(self._write(self._waiting[0])):
                    break
            if self._waiting:
                self._moved_at = time.monotonic()
                self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
                self._thread.start()

    def finish(self, limit_s: float = END_S) -> None:
        """Wait for what waits, as long as the reader takes some of it, and not longer than the limit; then give the reader up."""
        begun = self._moved_at = time.monotonic()
        while not self._gave_up:
            with self._lock:
                thread = self._thread
            if thread is None:
                return
            thread.join(_AGAIN_S)
            now = time.monotonic()
            if now - begun > limit_s or now - self._moved_at > self._patience_s:
                for lines in list(_streams):
                    lines.give_up(self._inode)

    def give_up(self, inode: tuple[int, int]) -> None:
        """Say no more, if that is who reads here: one who took half a line, perhaps of another stream (`2>&1`)."""
        if inode == self._inode:
            self._gave_up = True
            silence(self._stream)

    def _room(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        return bool(poll.poll(wait_s * 1000))

    def _write(self, line: bytes) -> int:
        """Write the beginning of a line where there is room; returns the count of bytes that need no more writing."""
        try:
            return os.write(self._file, line[:ATOMIC_BYTES])
        except BlockingIOError:
            return 0
        except OSError:  # the reader is gone
            silence(self._stream)
            return len(line)

    def _took(self, taken: int) -> bool:
        """Count what was written of the first line; with the lock. Returns whether that is anything."""
        line = self._waiting.popleft()
        self._waiting_bytes -= taken
        if taken < len(line):
            self._waiting.appendleft(line[taken:])
        elif not self._waiting and self.dropped:
            said = f"({self.dropped} lines that nobody read were dropped here)\n".encode()
            self.dropped = 0
            self._waiting.append(said)
            self._waiting_bytes += len(said)
        if taken:
            self._moved_at = time.monotonic()
        return taken > 0

    def _follow(self) -> None:
        """The thread: write when there is room again, until nothing waits. Without the lock: a terminal may block it."""
        while True:
            has_room = self._room(_LOOK_EVERY_S) and not self._gave_up
            taken = self._write(self._waiting[0]) if has_room else 0
            with self._lock:
                if has_room:
                    self._took(taken)
                if not self._waiting or self._gave_up:
                    self._thread = None
                    return
            if has_room and not taken:  # less room than the next character takes
                time.sleep(_AGAIN_S)


atexit.register(finish_all)

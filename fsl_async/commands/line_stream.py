"""Lines for whoever reads a node's output, who may be slow, stopped (Ctrl-S), or never there: writing never waits for them.

A line is written at once where there is room. What finds a full pipe waits in memory, and a thread that lives only that long writes it when
there is room again; beyond `LIMIT_BYTES` the newest lines are dropped, and one line says how many.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import stat
import threading
import time
from collections import deque
from typing import Final, TextIO

LIMIT_BYTES: Final = 1 << 20
"""Of lines that wait."""
ATOMIC_BYTES: Final = 512
"""So much fits where poll(2) says that there is room: POSIX's least PIPE_BUF."""
PATIENCE_S: Final = 2.0
"""At the end of a process: so long for a reader that takes nothing."""
_LOOK_EVERY_S: Final = 0.5


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
        self._giving_up = False
        self._file = -1
        with contextlib.suppress(OSError, ValueError):
            file = stream.fileno()
            if not stat.S_ISREG(os.fstat(file).st_mode):
                self._file = file

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
            if self._waiting and self._waiting_bytes + len(data) > self._limit_bytes:
                self.dropped += 1
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._thread is not None:
                return
            while self._waiting and self._room(0.0):
                self._write_some()
            if self._waiting:
                self._moved_at = time.monotonic()
                atexit.register(self.finish)
                self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait for what waits, as long as the reader takes some of it."""
        self._giving_up = True
        self._moved_at = time.monotonic()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _room(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        return bool(poll.poll(wait_s * 1000))

    def _write_some(self) -> None:
        """Write where there is room; with the lock."""
        line = self._waiting.popleft()
        try:
            taken = os.write(self._file, line[:ATOMIC_BYTES])
        except BlockingIOError:
            taken = 0
        except OSError:  # the reader is gone
            silence(self._stream)
            taken = len(line)
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

    def _follow(self) -> None:
        """The thread: write when there is room again, until nothing waits."""
        while True:
            room = self._room(_LOOK_EVERY_S)
            with self._lock:
                if room:
                    self._write_some()
                idle_s = time.monotonic() - self._moved_at
                if not self._waiting or (self._giving_up and idle_s > self._patience_s):
                    self._thread = None
                    return

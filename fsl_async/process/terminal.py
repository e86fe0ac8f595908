"""Writes without blocking to terminals that may not be read (Ctrl-S, a pty without a reader).

After poll(2) a pipe takes `PIPE_BUF` bytes, but a terminal may take only one: a longer write(2)
blocks. O_NONBLOCK would apply to the open file, which the shell and other processes share; so the
terminal is opened again, for a flag of our own.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select

_PATIENCE_S = 0.1


def open_anew(file: int) -> int | None:
    """Open the terminal behind `file` for non-blocking writes.

    None where it is none, or may not be opened (after `su`).
    """
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(file), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return None


def is_attended() -> bool:
    """Whether standard input, output or error is a terminal, as it is not under a scheduler."""
    return any(os.isatty(file) for file in (0, 1, 2))


def write_if_room(file: int, data: bytes) -> None:
    """Write up to `PIPE_BUF` bytes, as far as there is room. Safe in signal handlers; no errors."""
    with contextlib.suppress(OSError):
        if not os.isatty(file):
            if select.select((), (file,), (), 0)[1]:
                os.write(file, data)
            return
        anew = open_anew(file)
        if anew is None:
            _write_in_thread(file, data)
            return
        try:
            os.write(anew, data)
        finally:
            os.close(anew)


def _write_in_thread(file: int, data: bytes) -> None:
    """Write in a thread, which may block for ever; wait at most `_PATIENCE_S`.

    Not by `threading`: the code that a signal interrupted may hold its locks.
    """
    over = _thread.allocate_lock()
    over.acquire()

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(file, data)
        over.release()

    _thread.start_new_thread(write, ())
    over.acquire(timeout=_PATIENCE_S)

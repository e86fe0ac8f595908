"""Terminals that nobody reads (Ctrl-S, a pty whose other side does nothing): how to write to one
without waiting for it.

poll(2) tells of a pipe that `PIPE_BUF` bytes fit, of a terminal only that one does: what is longer
waits in write(2). Not to wait there is a flag of the open file, which the shell and others share
with us; so the terminal is opened once more, for that flag to be ours alone.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select

_PATIENCE_S = 0.1


def open_anew(file: int) -> int | None:
    """Open the terminal that `file` is for writes that do not wait; None where it is none, or not
    ours to open (after `su`).
    """
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(file), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return None


def is_attended() -> bool:
    """Whether standard input, output or error is a terminal. False for what Slurm, systemd and
    other schedulers start.
    """
    return any(os.isatty(file) for file in (0, 1, 2))


def write_if_room(file: int, data: bytes) -> None:
    """Write up to `PIPE_BUF` bytes, or what there is room for, or nothing. Safe in a signal
    handler; never raises.
    """
    with contextlib.suppress(OSError):
        if not os.isatty(file):
            if select.select((), (file,), (), 0)[1]:
                os.write(file, data)
            return
        anew = open_anew(file)
        if anew is None:
            _write_beside(file, data)
            return
        try:
            os.write(anew, data)
        finally:
            os.close(anew)


def _write_beside(file: int, data: bytes) -> None:
    """Write in a thread that may wait for ever. Not `threading`: the code that a signal interrupts
    may hold its locks.
    """
    over = _thread.allocate_lock()
    over.acquire()

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(file, data)
        over.release()

    _thread.start_new_thread(write, ())
    over.acquire(timeout=_PATIENCE_S)

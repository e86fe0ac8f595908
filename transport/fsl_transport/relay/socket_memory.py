"""How much of the system's memory a TCP connection holds: what came and was not read, and what was written and is not acknowledged."""

from __future__ import annotations

import array
import contextlib
import socket
import struct
import sys
from typing import Final

_SO_MEMINFO: Final = 55
"""Of asm-generic/socket.h, since Linux 4.12."""
_MEMINFO: Final = struct.Struct("9i")
_SO_NWRITE: Final = 0x1024
"""Of Darwin's sys/socket.h: what was written and is not acknowledged."""


def of(connection: socket.socket) -> int:
    """Bytes, as the kernel counts them on Linux (packets take more room than what is in them); elsewhere twice the payload, which is about as much. 0 where nobody says it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, struct.error):  # an older kernel, or one that is none
            told = connection.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
            # What it has set aside for later (the fifth) is no memory yet, and older kernels never give it back.
            received, _, _, _, _, written, _, backlog, _ = _MEMINFO.unpack(told)
            return int(received + written + backlog)
    return 2 * (unread(connection) + unsent(connection))


def unread(connection: socket.socket) -> int:
    """Bytes that came and were not read. 0 where nobody says it."""
    return _asked(connection, "FIONREAD")


def unsent(connection: socket.socket) -> int:
    """Bytes that were written and are not acknowledged. 0 where nobody says it."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            return connection.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return 0
    return _asked(connection, "TIOCOUTQ")


def _asked(connection: socket.socket, what: str) -> int:
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return 0
    waiting = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # no TCP connection; ValueError: it is closed
        fcntl.ioctl(connection, getattr(termios, what), waiting)
    return waiting[0]

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


def of(connection: socket.socket) -> int:
    """Bytes, as the kernel counts them on Linux (packets take more room than what is in them); elsewhere twice the payload, which is about as much. 0 where nobody says it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an older kernel, or one that is none
            told = connection.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
            received, _, _, _, ahead, written, _, backlog, _ = _MEMINFO.unpack(told)
            return int(received + max(0, ahead) + written + backlog)
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        return 2 * payload(connection)
    return 0


def payload(connection: socket.socket) -> int:
    """Bytes that were not read, and that are not acknowledged. 0 where nobody says it."""
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return 0
    total = 0
    for what in (termios.FIONREAD, termios.TIOCOUTQ):
        waiting = array.array("i", [0])
        fcntl.ioctl(connection, what, waiting)
        total += waiting[0]
    return total

"""The socket between a rank and its node: whole messages, with descriptors. Imports no torch.

A Unix socket of type SEQPACKET, at an abstract address: it leaves no file behind, whatever kills
its processes. An abstract address has no permissions, so both sides look at the user of the other
one, which the kernel vouches for, and accept only their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from fsl_async.errors import ExitCode, FslError
from fsl_async.roles.messages import Message, MessageError, Table

MOST_BYTES = 128 << 10
MOST_FILES = 16
_MOST_RIGHTS = socket.CMSG_LEN(MOST_FILES * array("i").itemsize)
ADDRESS = "FSL_GANG"
ERRORS = "FSL_GANG_ERRORS"
"""Memory of the node, as a path: ranks that die append "START ERROR", START counted by torchrun."""
"""Environment variable with the name of the node's socket, for ranks that the node starts."""


class NodeLostError(FslError):
    """The node has ended, or there is none."""

    default_code = ExitCode.BUG


def address_of(agent: int) -> str:
    """Name of the socket of the node whose ranks this torchrun (its process id) starts."""
    # Process ids are those of a container; these addresses may be shared by several.
    return f"fsl-gang-{os.getuid()}-{Path('/proc/self/ns/pid').stat().st_ino}-{agent}"


def listener(name: str) -> socket.socket:
    """Listen at an abstract address. Raises OSError where another process does."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        made.bind(f"\0{name}")
        made.listen(1024)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


class Link:
    """One end of a connection. reads: the messages that the other end may send.

    A rank on another machine has a `remote.RemoteLink` instead.
    """

    def __init__(self, connected: socket.socket, reads: Table, writes: Table) -> None:
        self._socket = connected
        self._reads, self._writes = reads, writes

    @classmethod
    def dial(cls, name: str, reads: Table, writes: Table) -> Link:
        """Connect to a node. Raises OSError where there is none."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            made.connect(f"\0{name}")
            if user_of(made) != os.getuid():
                raise ConnectionRefusedError("the node there is another user's")
        except OSError:
            made.close()
            raise
        return cls(made, reads, writes)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message, files: Sequence[int] = (), *, waits: bool = True) -> None:
        """Send a message, and copies of descriptors. Raises OSError, as where it must not wait."""
        data: bytes = msgpack.packb(self._writes.to_wire(message))
        flags = 0 if waits else socket.MSG_DONTWAIT
        # Not socket.send_fds and recv_fds: in Python 3.11 they ignore the flags.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
        self._socket.sendmsg([data], rights, flags)

    def receive(self, *, waits: bool = True) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors, which are the caller's; None if none is
        there.

        Raises EOFError where the other end has closed, and MessageError, OSError.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if waits else socket.MSG_DONTWAIT)
        try:
            data, rights, found, _ = self._socket.recvmsg(MOST_BYTES, _MOST_RIGHTS, flags)
        except BlockingIOError:
            return None
        files = _descriptors(rights)
        try:
            return self._reads.from_wire(unpacked(_whole(data, found))), files
        except BaseException:
            for file in files:
                os.close(file)
            raise

    def shut(self) -> None:
        """End the connection, also for a thread that waits in `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    files = array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return list(files)


def user_of(connected: socket.socket) -> int:
    """The user id of the process at the other end."""
    size = struct.calcsize("3i")
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _whole(data: bytes, flags: int) -> bytes:
    if not data:
        raise EOFError("closed")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise MessageError(f"a message of more than {MOST_BYTES} bytes")
    return data


def unpacked(data: bytes) -> Any:
    """What the msgpack of a message holds. Raises MessageError."""
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {error}") from None

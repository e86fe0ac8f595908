"""Between a rank and its node: a socket of messages, and shared vectors. Imports no torch.

A Unix socket of type SEQPACKET, at an abstract address: it leaves no file behind, whatever kills
its processes. An abstract address has no permissions, so both sides look at the user of the other
one, which the kernel vouches for, and accept only their own. Messages are whole, with descriptors.

The vectors are in anonymous memory of memfd_create: it has no name, so nothing is left when all
processes are killed, and the size of /dev/shm does not limit it. Its pages are there before it is
used (posix_fallocate), so that too little memory is an error here, not a SIGBUS in training, and no
copy in `fed.step` waits for new pages. It is sealed: no process can shorten it under another.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
from attrs import define

from fsl_async.errors import ExitCode, FslError, TaskError
from fsl_async.learn.client.ports import Vector
from fsl_async.roles.messages import Message, MessageError, Table
from fsl_async.store.vectors.memory import available_bytes

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
        raise MessageError(f"not msgpack: {error}", "bad-content") from None


_BYTES = 4


@define
class _Slot:
    file: int
    memory: mmap.mmap
    vector: weakref.ref[Vector] | None = None
    is_retired: bool = False


class Slots:
    """The node's vectors, all of one length, each a slot with a number. Thread-safe.

    A vector that nothing refers to any more gives its slot back.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()

    def allocate(self, values: int) -> Vector:
        """Make a vector, with any content. Raises TaskError where there is no memory for it."""
        with self._lock:
            for slot in self._slots:
                is_free = slot.vector is None or slot.vector() is None
                if is_free and not slot.is_retired:
                    break
            else:
                slot = self._add(values)
            vector = np.frombuffer(slot.memory, np.float32)
            slot.vector = weakref.ref(vector)
        return vector

    def reserve(self, values: int, count: int) -> None:
        """Have `count` slots, so that later vectors need no new memory."""
        with self._lock:
            while len(self._slots) < count:
                self._add(values)

    def number_of(self, vector: Vector) -> int:
        """The number of a vector's slot."""
        with self._lock:
            return self._number_of(vector)

    def _number_of(self, vector: Vector) -> int:
        return next(
            number
            for number, slot in enumerate(self._slots)
            if slot.vector is not None and slot.vector() is vector
        )

    def retire(self, vector: Vector) -> None:
        """Use a vector's slot for no other one: ranks of a gang that is lost may still write it."""
        with self._lock:
            self._slots[self._number_of(vector)].is_retired = True

    def restore(self) -> None:
        """Use retired slots again: other ranks are here, so those before have ended."""
        with self._lock:
            for slot in self._slots:
                slot.is_retired = False

    def file(self, number: int) -> int:
        """The descriptor of a slot."""
        return self._slots[number].file

    @property
    def count(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def close(self) -> None:
        """Close the descriptors; memory in use stays until its vectors are gone."""
        with self._lock:
            for slot in self._slots:
                os.close(slot.file)
            self._slots.clear()

    def _add(self, values: int) -> _Slot:
        size = values * _BYTES
        # Looked at first: the kernel would take pages until it ends some process for them.
        left = available_bytes()
        if left is not None and size > left:
            raise _too_large(size, f"{left / 1e9:.2f} GB are left")
        file = os.memfd_create("fsl-vector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            os.close(file)
            raise _too_large(size, str(error)) from error
        self._slots.append(_Slot(file, memory))
        return self._slots[-1]


def _too_large(size: int, why: str) -> TaskError:
    return TaskError(
        f"no memory for a vector of {size / 1e9:.2f} GB that the ranks share ({why}): a gang needs"
        " three times 4 bytes for each parameter, besides the model"
    )


def mapped(file: int, values: int, *, touches: bool = True) -> Vector:
    """Map a slot that came from the node, and close its descriptor. Raises TaskError.

    touches: have all of it in this process's page tables at once.
    """
    try:
        size = os.fstat(file).st_size
        if size != values * _BYTES:
            raise TaskError(f"the node shares {size} bytes for a model of {values} values")
        # Of sparse memory only what is used shall have pages. A node's slots are sealed, it is not.
        is_sparse = not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW
        populates = 0 if is_sparse or not touches else mmap.MAP_POPULATE
        memory = mmap.mmap(file, size, mmap.MAP_SHARED | populates)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.float32)


def sparse(values: int) -> int:
    """Make a slot whose pages come as they are used; returns its descriptor."""
    file = os.memfd_create("fsl-vector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, values * _BYTES)
    return file


def written(data: bytes) -> int:
    """Put bytes into anonymous memory; returns its descriptor, the caller's to close."""
    file = os.memfd_create("fsl-message", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(file), "wb") as out:
        out.write(data)
    return file


def read_back(file: int, most: int) -> bytes:
    """Return what `written` put there, and close it. Raises ValueError beyond `most` bytes."""
    try:
        size = os.fstat(file).st_size
        if size > most:
            raise ValueError(f"{size} bytes, of which {most} are allowed")
        return os.pread(file, size, 0)
    finally:
        os.close(file)

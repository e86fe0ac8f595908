"""Between a gang and its node: connections, and shared vectors. Imports no torch.

A gang is the ranks of one client: the processes of one torchrun that train one model together. Its
node is the client's process, and no rank.

A connection is a Unix socket at an abstract address: it leaves no file behind, whatever kills its
processes. An abstract address has no permissions, so both sides look at the user of the other one,
which the kernel vouches for, and accept only their own. A message is a name and its values.

The vectors are in anonymous memory of memfd_create: it has no name, so nothing is left when all
processes are killed, and the size of /dev/shm does not limit it. Its pages are there before it is
used (posix_fallocate), so that too little memory is an error here, not a SIGBUS in training, and no
copy in `fed.step` waits for new pages. It is sealed: no process can shorten it under another. A
rank opens it by its path in /proc of the node.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
from attrs import define, frozen

from fsl_async.errors import ExitCode, FslError, TaskError
from fsl_async.learn.client.ports import Vector
from fsl_async.store.vectors.memory import available_bytes

MOST_BYTES = 64 << 20
"""The largest message; a manifest may be large."""
SEND_S = 60
"""How long the other end of a connection may take no bytes."""
ADDRESS = "FSL_GANG"
"""Environment variable with the name of the node's socket, for ranks that the node starts."""
ERRORS = "FSL_GANG_ERRORS"
"""Memory of the node, as a path: ranks that die append "START ERROR", START counted by torchrun."""


class NodeLostError(FslError):
    """The node or another rank of this client has ended, or there is no node."""

    default_code = ExitCode.BUG


@frozen
class Place:
    """Which rank this process is, by the variables that torchrun sets.

    generation: how often torchrun has started the ranks again. local: the rank's number on its
    machine, which has `local_world` of them.
    """

    rank: int
    world: int
    generation: int
    local: int
    local_world: int

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Place | None:
        """Return the place of this process; None where it is no rank of several."""
        world = int(environ.get("WORLD_SIZE", "1"))
        if world < 2 or "RANK" not in environ:  # set by other launchers too
            return None
        rank = int(environ["RANK"])
        return cls(
            rank,
            world,
            int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            int(environ.get("LOCAL_RANK", str(rank))),
            int(environ.get("LOCAL_WORLD_SIZE", str(world))),
        )

    @property
    def is_remote(self) -> bool:
        """Whether the node is on another machine, that of rank 0."""
        return self.rank != self.local

    @property
    def spans_machines(self) -> bool:
        """Whether some rank is on another machine than others."""
        return self.local_world != self.world


def address_of(agent: int) -> str:
    """Name of the socket of the node whose ranks this torchrun (its process id) starts."""
    # Process ids are those of a container; these addresses may be shared by several.
    return f"fsl-gang-{os.getuid()}-{Path('/proc/self/ns/pid').stat().st_ino}-{agent}"


def listener(name: str) -> socket.socket:
    """Listen at an abstract address. Raises OSError where another process does."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(f"\0{name}")
        made.listen(1024)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


class Link:
    """One end of a connection between a rank and its node. Any thread may send."""

    def __init__(self, connected: socket.socket) -> None:
        """Raises ConnectionRefusedError where the other end is another user's."""
        size = struct.calcsize("3i")
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connected.close()
            raise ConnectionRefusedError("the process there is another user's")
        connected.setblocking(True)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._connection = Connection(connected.detach())
        self._lock = threading.Lock()

    @classmethod
    def dial(cls, name: str) -> Link:
        """Connect to a node. Raises OSError where there is none."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.connect(f"\0{name}")
        except OSError:
            made.close()
            raise
        return cls(made)

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def send(self, name: str, *values: object) -> None:
        """Send a message. Raises OSError where the other end is gone, or has not read for long."""
        data: bytes = msgpack.packb([name, *values])
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self, waits_s: float | None = None) -> list[Any] | None:
        """Return the next message, [name, *values]; None if none came within `waits_s`.

        Raises EOFError where the other end has closed, OSError, and ValueError for what is no
        message.
        """
        if waits_s is not None and not self._connection.poll(waits_s):
            return None
        found = msgpack.unpackb(self._connection.recv_bytes(MOST_BYTES))
        match found:
            case [str(), *_]:
                return found  # type: ignore[no-any-return]
            case _:
                raise ValueError("a message is a name and its values")

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


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

    def path(self, number: int) -> str:
        """The path at which another process of this user opens a slot."""
        return f"/proc/{os.getpid()}/fd/{self._slots[number].file}"

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


def shared_vector(path: str, values: int) -> Vector:
    """Map a slot of the node, with all of it in this process's page tables. Raises TaskError."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size != values * _BYTES:
            raise TaskError(f"the node shares {size} bytes for a model of {values} values")
        memory = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.float32)


def sparse_vector(values: int) -> Vector:
    """Return a vector that takes pages for what is used of it."""
    file = os.memfd_create("fsl-vector", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, values * _BYTES)
        return np.frombuffer(mmap.mmap(file, values * _BYTES, mmap.MAP_SHARED), np.float32)
    finally:
        os.close(file)

"""Vectors in anonymous memory that the node and its ranks share. Imports no torch.

The memory is of memfd_create: it has no name, so nothing is left when all processes are killed, and
the size of /dev/shm does not limit it. Its pages are there before it is used (posix_fallocate), so
that too little memory is an error here, not a SIGBUS in training, and no copy in `fed.step` waits
for new pages. It is sealed: no process can shorten it under another.
"""

import fcntl
import mmap
import os
import threading
import weakref

import numpy as np
from attrs import define

from fsl_async.errors import TaskError
from fsl_async.learn.client.ports import Vector
from fsl_async.store.vectors.memory import available_bytes

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
    """What `written` put there; closes the descriptor. Raises ValueError beyond `most` bytes."""
    try:
        size = os.fstat(file).st_size
        if size > most:
            raise ValueError(f"{size} bytes, of which {most} are allowed")
        return os.pread(file, size, 0)
    finally:
        os.close(file)

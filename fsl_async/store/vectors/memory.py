"""Memory for vectors of the model's size: anonymous, or mapped from scratch files.

A mapped vector behaves as any other. Its pages are written to disk and dropped where memory is
short, so a machine needs memory for a few chunks, and disk for all vectors. A scratch file has no
name once it is mapped: nothing of it outlives the process, and recovery never reads one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsl_async.errors import disk_words
from fsl_async.store.errors import StoreError
from fsl_codecs import new_vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Allocate = Callable[..., NDArray[Any]]

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

MODELS_IN_MEMORY = 3.4
"""Fp32 models that the vectors of a run take: weights, one of the outer optimizer, residual, a
coded change and chunks. A mean of versions is one more, and so is what a rule of adapters
owes.
"""


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return what the system, and the container's limit (cgroup v2), leave; None if unknown."""
    found = []
    try:
        lines = meminfo.read_text().splitlines()
        found += [int(one.split()[1]) * 1024 for one in lines if one.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        found.append(max(0, int(limit) - int(used)))  # "max" is no number: no limit
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def memory_lacking(values: int, more_vectors: int) -> str:
    """Return why the vectors do not fit into memory; empty if they do, or if that is unknown.

    more_vectors: beside those of MODELS_IN_MEMORY.
    """
    have, need = available_bytes(), int((MODELS_IN_MEMORY + more_vectors) * 4 * values)
    if have is None or need <= have:
        return ""
    return (
        f"vectors are mapped from files in the run directory: to keep them in memory takes"
        f" {need / 1e9:.1f} GB, and {have / 1e9:.1f} GB are available"
    )


def anonymous(values: int, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """Return a vector of zeros in memory."""
    return new_vector(values, dtype)


def _reserve(descriptor: int, size: int) -> None:
    """Give a new file its blocks. Raises OSError."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(1 << 20)
    for at in range(0, size, len(zeros)):
        os.pwrite(descriptor, zeros[: size - at], at)


class Mapped:
    """Makes vectors that are mapped from files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, values: int, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
        """Return a vector of zeros. StoreError: the disk has no space for it."""
        size = max(1, values * np.dtype(dtype).itemsize)
        try:
            with tempfile.TemporaryFile(prefix="scratch-", dir=self._folder) as file:
                # A write to a page for which the disk has no space would kill the process.
                _reserve(file.fileno(), size)
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise StoreError(
                f"no scratch file of {size / 1e9:.1f} GB in {self._folder}: {disk_words(error)}"
            ) from error
        return np.frombuffer(memory, dtype, values)

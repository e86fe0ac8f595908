"""Measures this process's resident memory, in bytes."""

import ctypes
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Return the present resident memory, from /proc (Linux), else the peak."""
    return _statm(1) or peak_bytes()


def mapped_bytes() -> int:
    """Return the part of it that is pages of mapped files (libraries, data). Zero without /proc.

    The system can drop such pages and read them again.
    """
    return _statm(2)


def _statm(field: int) -> int:
    """Return a field of /proc/self/statm in bytes, see proc(5); zero without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[field])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """Return the peak: VmHWM on Linux, whose ru_maxrss includes the parent's before the fork."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found << 10


class MemoryMark:
    """Measures growth from a mark: a process with libraries, sessions and data, without model."""

    _at = 0
    _mapped = 0

    @classmethod
    def take(cls, held: int = 0) -> None:
        """Set the mark. held: bytes of a model that exist already and count as growth."""
        cls._at = resident_bytes() - held
        cls._mapped = mapped_bytes()

    @classmethod
    def grown(cls) -> int:
        """Return the peak beyond the mark, without file pages that were mapped since."""
        return max(0, peak_bytes() - cls._at - max(0, mapped_bytes() - cls._mapped))


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
LARGEST_BYTES = 1 << 25
"""The limit of glibc's dynamic threshold on 64-bit machines."""


def keep_freed_blocks() -> bool:
    """Let glibc reuse freed blocks: it keeps up to 64 MiB at the end of each heap.

    Each arriving chunk is a block that one thread allocates and another frees. After blocks of
    1 MiB glibc's trim threshold is 2 MiB (mallopt(3), M_TRIM_THRESHOLD): a freed chunk's pages are
    returned to the system, and requested and cleared for the next one. So are activations, at each
    step. The limits set here are those that glibc itself reaches once a block of 32 MiB was freed.
    Returns whether they could be set.
    """
    return _set(_M_MMAP_THRESHOLD, LARGEST_BYTES) and _set(_M_TRIM_THRESHOLD, 2 * LARGEST_BYTES)


def share_one_heap() -> bool:
    """Let all threads share glibc's main heap, and keep freed blocks.

    Where only one thread of many runs at a time, heaps of their own (mallopt(3), M_ARENA_MAX) only
    keep what others could use. Call it before the threads start.
    """
    return _set(_M_ARENA_MAX, 1) and keep_freed_blocks()


def _set(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (OSError, AttributeError):
        return False

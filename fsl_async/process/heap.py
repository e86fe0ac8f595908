"""Sets limits of glibc's heap."""

from __future__ import annotations

import ctypes
import sys

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

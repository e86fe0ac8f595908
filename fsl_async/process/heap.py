"""Settings of glibc's heap; nothing elsewhere."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 17
"""Where glibc begins, too."""
LARGEST_BYTES = 1 << 25
"""Where glibc's own adjusting ends on machines of 64 bits."""


def keep_large_blocks_apart() -> bool:
    """Let every block of 128 KiB and more be its own mapping, for good, so that it is given back
    when it is freed. Whether that could be set.

    glibc begins so, but raises the limit (to as much as 32 MiB) whenever such a block is freed
    (mallopt(3), M_MMAP_THRESHOLD). From then on uploads, activations and what is kept of clients
    share one heap, and what is kept pins the holes that the others leave. Setting the limit ends
    that. The price is page faults in a training step.
    """
    return _set(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_freed_blocks() -> bool:
    """Let what is freed be used again before the system gets it back: up to 64 MiB at the end of
    each heap. Whether that could be set.

    Every chunk that comes in is a block of its own, made in one thread and freed in another. With
    glibc's limits as chunks of 1 MiB leave them (2 MiB, mallopt(3), M_TRIM_THRESHOLD) its pages go
    back to the system and are asked for anew, and cleared, for the next one. These are the limits
    that glibc comes to by itself once a block of 32 MiB was freed.
    """
    return _set(_M_MMAP_THRESHOLD, LARGEST_BYTES) and _set(_M_TRIM_THRESHOLD, 2 * LARGEST_BYTES)


def _set(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (OSError, AttributeError):
        return False

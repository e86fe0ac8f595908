"""The C library's heap, where it is glibc's."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 17
"""Where glibc begins, too."""


def keep_large_blocks_apart() -> bool:
    """Let every block of 128 KiB and more be its own mapping, for good, so that it is given back when it is freed. Whether that could be set.

    glibc begins so, but raises the limit (to as much as 32 MiB) whenever such a block is freed (mallopt(3), M_MMAP_THRESHOLD). From then on uploads, activations and what is
    kept of clients share one heap, and what is kept pins the holes that the others leave. Setting the limit ends that. The price is page faults in a training step.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
    except (OSError, AttributeError):
        return False

"""This process's resident memory, now and at its highest. Zero where the system does not say."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Now; from /proc (Linux), else the highest so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return peak_bytes()
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The highest so far."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found << 10


class Mark:
    """From where growth is measured; taken anew when what the libraries take is known better."""

    _at = 0

    @classmethod
    def take(cls) -> None:
        """Measure from here on."""
        cls._at = resident_bytes()

    @classmethod
    def grown(cls) -> int:
        """The highest so far, beyond the mark."""
        return max(0, peak_bytes() - cls._at)

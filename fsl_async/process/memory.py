"""This process's resident memory, now and at its highest. Zero where the system does not report
it.
"""

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


def mapped_bytes() -> int:
    """What of it are pages of files: libraries, and data that are mapped. They can be dropped and
    read again. Zero where nobody says.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The highest so far. Linux's ru_maxrss begins with the parent's, of which this process was
    forked; VmHWM does not.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found << 10


class MemoryMark:
    """From where growth is measured: what a process takes that has its libraries, sessions and data
    open, and no model.
    """

    _at = 0
    _mapped = 0

    @classmethod
    def take(cls, held: int = 0) -> None:
        """Measure from here on. held: bytes of a model that are there already and belong to the
        growth.
        """
        cls._at = resident_bytes() - held
        cls._mapped = mapped_bytes()

    @classmethod
    def grown(cls) -> int:
        """The highest so far, beyond the mark and without pages of files that were read since."""
        return max(0, peak_bytes() - cls._at - max(0, mapped_bytes() - cls._mapped))

"""Chooses the number of torch's threads in a client. Does not import torch."""

from __future__ import annotations

import os

VARIABLE = "OMP_NUM_THREADS"


def cores() -> int:
    """Return the number of cores that this process may use, by its container or batch system."""
    try:
        return len(os.sched_getaffinity(0))
    # macOS has no such function.
    except AttributeError:
        return os.cpu_count() or 1


def threads_here(setting: int) -> int:
    """Return `train.threads` of this machine: the setting, else OMP_NUM_THREADS, else all cores."""
    text = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    given = int(text[:4]) if text.isascii() and text.isdecimal() else 0
    return setting or given or cores()

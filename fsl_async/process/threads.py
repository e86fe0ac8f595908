"""How many threads a client's torch computes with. Pure but for the machine's own facts; does not
import torch.
"""

from __future__ import annotations

import os

VARIABLE = "OMP_NUM_THREADS"


def cores() -> int:
    """Cores that this process may use: a container or a batch system may give it fewer than there
    are.
    """
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def threads_here(setting: int) -> int:
    """What `train.threads` comes to on this machine: the setting, else OMP_NUM_THREADS, else every
    core.
    """
    asked = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    wanted = int(asked[:4]) if asked.isascii() and asked.isdecimal() else 0
    return setting or wanted or cores()

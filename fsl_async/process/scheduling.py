"""How the operating system hands out processor time to this process."""

from __future__ import annotations

import os
from typing import Any


def run_in_batches() -> bool:
    """Do not interrupt whoever is running each time something comes in: Linux's SCHED_BATCH, sched(7). Whether that was set.

    A relay is woken for every piece that TCP brings. On a machine with few cores it then takes the core from the sender, who would have brought more a moment later, and moves
    little at a time. A free core is taken at once as before; on a busy one the relay may wait for the end of a time slice, some milliseconds. Threads made later inherit it. Where the operator has chosen another policy than the usual one, it stays.
    """
    system: Any = os  # mypy checks for systems that have none of this as well
    try:
        if system.sched_getscheduler(0) != system.SCHED_OTHER:
            return False
        system.sched_setscheduler(0, system.SCHED_BATCH, system.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or a sandbox that forbids it
        return False
    return True

"""`fsl-node demo fsdp`: clients of several ranks each, and one rank that is killed.

The client itself stays: its node process keeps the run's weights, torchrun starts the ranks again,
and they go on from the node's memory. Linux only, as FSDP clients are: it looks at /proc.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from attrs import evolve

from fsl_async.cluster.supervisor import Supervisor
from fsl_async.nodes.client.gang import RANK
from fsl_async.tools.demo.pretrain import pretrain
from fsl_async.tools.demo.scenario import Choices, Played, Scenario

RANKS = 2
_TORCHRUN = "--standalone"
"""An argument of the module where it is torchrun."""
_GONE, _BACK = " is gone", " ranks are here"
"""In lines of a client's node, when a rank is lost and when all of them are here."""


def fsdp(chosen: Choices) -> Scenario:
    """The demo of pretraining with such clients, which take longer to start."""
    seconds = chosen.seconds or 80.0 + 60.0 * chosen.late_s
    chosen = evolve(chosen, clients=chosen.clients or 2, seconds=seconds)
    killed = "a rank of {} gets SIGKILL, is started again by torchrun"
    made = pretrain(chosen, of_client=f" of {RANKS} ranks", killed=killed)
    ranked = [evolve(node, options=(*node.options, "--ranks", str(RANKS))) for node in made.clients]
    faults = [evolve(fault, what=kill_rank) for fault in made.faults]
    return evolve(made, nodes=[*made.servers, *ranked], faults=faults, reads=see_ranks)


def kill_rank(children: Supervisor, name: str) -> str:
    """Send SIGKILL to the last rank of a client. Returns a sentence; "" without a rank."""
    pid = children.pid(name)
    ranks = [] if pid is None else ranks_of(pid)
    with contextlib.suppress(ProcessLookupError):
        if ranks:
            os.kill(ranks[-1], signal.SIGKILL)
            return f"SIGKILL to a rank of {name} (process {ranks[-1]})"
    return ""


def see_ranks(played: Played, name: str, text: str) -> str:
    """Take the line in which the node of the killed rank reports its loss or its return."""
    fault = played.fault(name)
    if fault is None:
        return ""
    if _GONE in text and fault.detected is None:
        fault.detected = time.time()
    elif _BACK in text and fault.back is None:
        fault.resumed = fault.back = time.time()
        return f"the ranks of {name} train again"
    return ""


def ranks_of(node: int) -> list[int]:
    """The processes of the ranks below a node, in the order of their start."""
    below, found = [node], []
    while below:
        pid = below.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                below += [int(child) for child in (task / "children").read_text().split()]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if RANK in words and _TORCHRUN not in words:
                found.append(pid)
    return sorted(found)

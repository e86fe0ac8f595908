"""Measures what faults of parameter servers cost groups: real processes on one machine.

    python benchmarks/groups.py [--seconds 90] [stop] [partition] [join]

Prints one JSON row for each kind of fault:

    stop    the last of three parameter servers is stopped (SIGSTOP) in a reduction for 60 s
    partition
            in a reduction, the way between the last of three parameter servers and the one that
            coordinates is cut for 60 s: their session, with all control messages and global
            weights, leads through a proxy that carries nothing then. The gloo connections of the
            reduction under way are not cut, so its sum may arrive at all; no other one can begin
    join    a fourth parameter server with two clients begins after the first global round

`next_s`: until the next decision. The other fields are those of `fsl-node demo groups --json`, in
which servers are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo.groups import GlobalRounds, groups
from fsl_async.tools.demo.runner import Runner
from fsl_async.tools.demo.scenario import Choices, Fault, Scenario, Stage
from fsl_async.tools.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsl_async.cluster.supervisor import Supervisor
    from fsl_async.tools.demo.scenario import Played

FAULT_S = 60.0


def sending(number: signal.Signals) -> Callable[[Supervisor, str], str]:
    """A fault that sends a signal."""
    return lambda children, name: number.name if children.kill(name, number) else ""


def writing(gate: Path, word: str) -> Callable[[Supervisor, str], str]:
    """A fault that writes what a proxy follows."""
    return lambda _, name: f"{word} {name} {gate.write_text(word)}"


def in_turn(
    rounds: GlobalRounds,
    victim: str,
    begin: Callable[[Supervisor, str], str],
    end: Callable[[Supervisor, str], str],
) -> list[Fault]:
    """A fault in a reduction, and its end."""
    is_over = lambda played: bool(played.faults) and since(played) > FAULT_S  # noqa: E731
    return [Fault(victim, rounds.in_reduction(victim, 0.0), begin), Fault(victim, is_over, end)]


def since(played: Played) -> float:
    """Seconds since the first fault."""
    return time.time() - played.faults[0].begun


def parted(scenario: Scenario, gate: Path) -> tuple[Scenario, Proxy]:
    """The scenario in which the last server dials the first one through a proxy."""
    first, *_, last = scenario.servers
    way = Proxy(("127.0.0.1", int(first.at.rpartition(":")[2])), follow=gate)
    dials = f"{first.name}={first.at}"
    words = tuple(word.replace(dials, f"{first.name}={way.address}") for word in last.options)
    detoured = evolve(last, options=words)
    nodes = [detoured if node is last else node for node in scenario.nodes]
    return evolve(scenario, nodes=nodes), way


def measure(fault: str, seconds: float) -> dict[str, Any]:
    """Play one fault."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        rounds, gate = GlobalRounds(), Path(folder) / "gate"
        chosen = Choices(seconds=seconds, run_dir=Path(folder))
        scenario = groups(chosen, 4 if fault == "join" else 3, rounds)
        last = scenario.servers[-1]
        if fault == "stop":
            ways = sending(signal.SIGSTOP), sending(signal.SIGCONT)
            scenario = evolve(scenario, faults=in_turn(rounds, last.name, *ways))
        elif fault == "partition":
            scenario, way = parted(scenario, gate)
            opened.callback(way.close)
            ways = writing(gate, "cut"), writing(gate, "open")
            scenario = evolve(scenario, faults=in_turn(rounds, last.name, *ways))
        else:
            late = evolve(last, when=lambda _: bool(rounds.decided))
            nodes = [late if node is last else node for node in scenario.nodes]
            begin = Fault(last.name, lambda _: bool(rounds.decided), lambda *_: "begins")
            scenario = evolve(scenario, nodes=nodes, faults=[begin])
        stage = Stage(print, Stopper())
        played = asyncio.run(Runner(scenario, stage, lambda *_: None).play())
        found = scenario.conclude(played, stage)
        at = played.faults[0].begun if played.faults else time.time()
        after = [moment - at for moment in rounds.decided if moment > at]
        row = {"fault": fault, "next_s": round(after[0], 1) if after else None}
        return row | {**found.summary, "run_dir": ""} | {"faults": found.problems}


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("faults", nargs="*", default=["stop", "partition", "join"])
    chosen = parser.parse_args()
    for fault in chosen.faults:
        print(json.dumps(measure(fault, chosen.seconds)), flush=True)


if __name__ == "__main__":
    main()

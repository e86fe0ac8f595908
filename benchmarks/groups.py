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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import asdict

from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo.groups import START_S, GroupsDemo, Play, free_ports, summarize
from fsl_async.tools.demo.settings import LOOPBACK
from fsl_async.tools.proxy import Proxy

if TYPE_CHECKING:
    from fsl_async.cluster.supervisor import Supervisor

FAULT_S = 60.0


class Faults(Play):
    """A demo with another fault."""

    fault = ""
    at_s = 0.0
    gate = Path()
    """What the proxy of a partition follows."""

    async def _run(self, supervisor: Supervisor) -> None:
        servers, seen = self.settings.servers, self.seen
        late = servers[-1:] if self.fault == "join" else []
        for name in servers:
            if name not in late:
                self.begin(supervisor, name)
        if not await self._until(lambda: bool(seen.decided), START_S):
            seen.faults.append("no global round was decided")
            return
        if self.fault == "join":
            self.at_s = self._elapsed()
            for name in late:
                self.begin(supervisor, name)
        else:
            await self.disturb(supervisor, servers[-1])
        await self._until_s(seen.decided[0] + self.settings.seconds)
        rounds = len(seen.decided)
        await self._until(lambda: len(seen.decided) > rounds, 60.0)
        await self._until(lambda: not self._reducing, 10.0)
        await self._end(supervisor)

    def begin(self, supervisor: Supervisor, name: str) -> None:
        """Start a parameter server and its clients."""
        supervisor.start(self.settings.server(name))
        for client in self.settings.clients_of(name):
            supervisor.start(self.settings.client(name, client))

    async def disturb(self, supervisor: Supervisor, victim: str) -> None:
        """Stop a parameter server in a reduction, or part it, and let it go on later."""
        await self._until(lambda: victim in self._reducing, 60.0)
        self.at_s = self._elapsed()
        is_parted = self.fault == "partition"
        if is_parted:
            self.gate.write_text("cut")
        else:
            supervisor.kill(victim, signal.SIGSTOP)
        await self._until_s(self.at_s + FAULT_S)
        if is_parted:
            self.gate.write_text("open")
        else:
            supervisor.kill(victim, signal.SIGCONT)
            self._reducing.discard(victim)


def measure(fault: str, seconds: float) -> dict[str, Any]:
    """Play one fault."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        count = 4 if fault == "join" else 3
        settings = GroupsDemo(
            data="", groups=count, clients=2, seconds=seconds, every_s=3.0, global_s=12.0,
            preset="0.5m", number_format="uniform", seed=0, run_dir=Path(folder),
            ports=free_ports(count),
        )  # fmt: skip
        gate = Path(folder) / "gate"
        if fault == "partition":
            first, *_, last = settings.servers
            way = Proxy((LOOPBACK, settings.ports[0]), follow=gate)
            opened.callback(way.close)
            settings = attrs.evolve(settings, detours={(last, first): way.address})
        play = Faults(settings, lambda _: None, Stopper())
        play.fault, play.gate = fault, gate
        seen = asyncio.run(play.play())
        found = summarize(settings, seen)
        after = [at - play.at_s for at in seen.decided if at > play.at_s]
        row = {"fault": fault, "next_s": round(after[0], 1) if after else None}
        return row | asdict(attrs.evolve(found, run_dir="")) | {"faults": seen.faults}


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

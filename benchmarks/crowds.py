"""Uploads beyond the receive budget, and streams on long paths, in virtual time.

    python benchmarks/crowds.py [--only crowd|long|line] [--seeds 12]

One JSON row for each case: the time beside what the writer or the path allows. Endpoints, streams,
receive budget and stripes are the production code; the network (`mem_link`) and the clock are
simulated, so rows do not depend on the machine, and every run of one commit gives the same. Chunks
are 1 MiB; settings are the defaults except `budget_mib`.

  * `crowd`: `clients` upload `mib` each at the same moment, each over its own path, to one writer.
    Each client had two uploads before, so its path is measured. `least_s` is the time the writer
    needs for all of it. `ratio` = `seconds` / `least_s`.
  * `long`: uploads without end; `waits_s` is the longest wait of one of them for its next chunk,
    `turn_s` the time the writer needs for one chunk of each.
  * `line`: one client, one stream after another over `stripes` connections that share the path;
    `first_s` the first of a session, `later_s` the mean of the three after it, over `--seeds`.
    `least_s`: bytes at the path's rate, plus one and a half RTTs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_transport.testing.mem_link import Conditions, MemNetwork
from fsl_transport.testing.virtual_time import VirtualScheduler

MIB = 1 << 20
CHUNK = bytes(MIB)
CROWDS = (
    {"clients": 400, "mib": 8, "budget_mib": 1024, "delay_s": 0.02, "writer_mib_s": 250},
    {"clients": 100, "mib": 12, "budget_mib": 128, "delay_s": 0.02, "writer_mib_s": 250},
    {"clients": 60, "mib": 24, "budget_mib": 64, "delay_s": 0.02, "writer_mib_s": 250},
)
LONG = ({"clients": 20, "budget_mib": 32, "delay_s": 0.02, "writer_mib_s": 50, "for_s": 60},)
LINES = (
    {"mbit_s": 1000, "delay_s": 0.045, "stripes": 1, "drop": 0.0, "mib": 64},
    {"mbit_s": 1000, "delay_s": 0.045, "stripes": 16, "drop": 0.001, "mib": 96},
    {"mbit_s": 200, "delay_s": 0.045, "stripes": 1, "drop": 0.0, "mib": 24},
    {"mbit_s": 200, "delay_s": 0.045, "stripes": 16, "drop": 0.001, "mib": 24},
    {"mbit_s": 50, "delay_s": 0.3, "stripes": 16, "drop": 0.01, "mib": 24},
    {"mbit_s": 10, "delay_s": 0.03, "stripes": 1, "drop": 0.0, "mib": 8},
)
CLIENT_BYTES_S = 125e6


class Source:
    """The same chunk again and again."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    def read(self, index: int, deliver: Callable[[tp.Buffer], None]) -> None:
        """Deliver at once."""
        deliver(CHUNK)


class Writer:
    """Writes a chunk of any peer in `chunk_s`, one after another."""

    def __init__(self, clock: VirtualScheduler, chunk_s: float) -> None:
        self._clock = clock
        self._chunk_s = chunk_s
        self._queue: deque[Callable[[bool], None]] = deque()

    def write(self, done: Callable[[bool], None]) -> None:
        """Write a chunk after those before it."""
        self._queue.append(done)
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        self._clock.call_at(self._clock.time() + self._chunk_s, self._end)

    def _end(self) -> None:
        done = self._queue.popleft()
        if self._queue:
            self._begin()
        done(True)


class World:
    """A listener and its clients, all up."""

    def __init__(
        self,
        conditions: Conditions,
        clients: int,
        budget_mib: int,
        *,
        seed: int = 7,
        stripes: int = 1,
    ) -> None:
        self.clock = VirtualScheduler()
        network = MemNetwork(self.clock, seed, conditions, stripes)
        settings = tp.TransportSettings(receive_budget_bytes=budget_mib * MIB)
        self.writer: Writer | None = None
        self.last: dict[str, float] = {}  # when a client's newest chunk came
        self.waits_s = 0.0
        self.up = self.sent = 0
        link = network.listener("ps")
        self.server = tp.ListenerEndpoint(
            link, self.clock, settings, self._take, "ps", incarnation=1, rng=random.Random(1)
        )
        self.clients = []
        for number in range(clients):
            name = f"c{number}"
            client = tp.DialerEndpoint(
                network.dialer(name, "ps"), self.clock, settings, self._take, name, incarnation=2,
                rng=random.Random(name),
            )  # fmt: skip
            client.connect(dict)
            self.clients.append(client)
        self.until(lambda: self.up == clients)

    def _take(self, event: tp.TransportEvent) -> None:
        if isinstance(event, tp.HelloReceived):
            self.server.welcome(event.peer, {})
        elif isinstance(event, tp.StreamOffered):
            self.last[event.peer] = self.clock.time()
            self.server.accept(event.peer, event.stream_id, Sink(self, event.peer))
        elif isinstance(event, tp.PeerUp) and not event.peer.startswith("c"):
            self.up += 1
        elif isinstance(event, tp.StreamSent):
            self.sent += 1
        elif isinstance(event, tp.PeerDown | tp.StreamFailed):
            raise SystemExit(f"crowds: at {self.clock.time():.1f} s: {event}")

    def came(self, peer: str) -> None:
        """Record that a client's next chunk has arrived."""
        now = self.clock.time()
        self.waits_s = max(self.waits_s, now - self.last[peer])
        self.last[peer] = now

    def until(self, happened: Callable[[], bool], limit_s: float = 3600.0) -> None:
        """Run until `happened()`."""
        ends_at = self.clock.time() + limit_s
        while not happened():
            if not self.clock.run_next() or self.clock.time() > ends_at:
                raise SystemExit("crowds: the case did not finish")

    def upload(self, mib: int, *, one_by_one: bool = False) -> float:
        """Let every client upload `mib` MiB; return the seconds."""
        begun, before = self.clock.time(), self.sent
        for number, client in enumerate(self.clients):
            client.offer("", f"s{begun}", {}, Source(mib))
            if one_by_one:
                self.until(lambda number=number: self.sent > before + number)  # type: ignore[misc]
        self.until(lambda: self.sent == before + len(self.clients))
        return self.clock.time() - begun


class Sink:
    """Passes chunks to the writer, if there is one."""

    def __init__(self, world: World, peer: str) -> None:
        self._world = world
        self._peer = peer

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """See ``ChunkSink``."""
        self._world.came(self._peer)
        if self._world.writer is None:
            done(True)
        else:
            self._world.writer.write(done)


def crowd(case: dict[str, Any]) -> dict[str, Any]:
    """All uploads at once."""
    conditions = Conditions(delay_s=case["delay_s"], bytes_per_s=CLIENT_BYTES_S)
    world = World(conditions, case["clients"], case["budget_mib"])
    for _ in range(2):
        world.upload(12, one_by_one=True)
    world.writer = Writer(world.clock, 1 / case["writer_mib_s"])
    seconds = world.upload(case["mib"])
    least_s = case["clients"] * case["mib"] / case["writer_mib_s"]
    ratio = round(seconds / least_s, 3)
    return {"seconds": round(seconds, 2), "least_s": round(least_s, 2), "ratio": ratio}


def long(case: dict[str, Any]) -> dict[str, Any]:
    """Uploads without end."""
    conditions = Conditions(delay_s=case["delay_s"], bytes_per_s=CLIENT_BYTES_S)
    world = World(conditions, case["clients"], case["budget_mib"])
    world.writer = Writer(world.clock, 1 / case["writer_mib_s"])
    for client in world.clients:
        client.offer("", "long", {}, Source(1_000_000))
    world.clock.run_until(world.clock.time() + case["for_s"])
    for peer in world.last:
        world.came(peer)
    return {"waits_s": round(world.waits_s, 2), "turn_s": case["clients"] / case["writer_mib_s"]}


def line(case: dict[str, Any], seeds: int) -> dict[str, Any]:
    """One stream after another."""
    each = case["mbit_s"] * 1e6 / 8 / case["stripes"]
    conditions = Conditions(delay_s=case["delay_s"], bytes_per_s=each, drop=case["drop"])
    first, later = [], []
    for seed in range(seeds):
        world = World(conditions, 1, 1024, seed=seed, stripes=case["stripes"])
        first.append(world.upload(case["mib"]))
        for _ in range(3):
            world.clock.run_until(world.clock.time() + 1)
            later.append(world.upload(case["mib"]))
    least_s = case["mib"] * MIB * 8e-6 / case["mbit_s"] + 3 * case["delay_s"]
    return {
        "first_s": round(statistics.mean(first), 2),
        "later_s": round(statistics.mean(later), 2),
        "least_s": round(least_s, 2),
        "seeds": seeds,
    }


def main() -> None:
    """Run every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("crowd", "long", "line"))
    parser.add_argument("--seeds", type=int, default=12)
    given = parser.parse_args()
    ways: tuple[tuple[str, Any, Any], ...] = (
        ("line", LINES, lambda case: line(case, given.seeds)),
        ("long", LONG, long),
        ("crowd", CROWDS, crowd),
    )
    for way, cases, measure in ways:
        if given.only in (None, way):
            for case in cases:
                print(json.dumps({"way": way, **case, **measure(case)}), flush=True)


if __name__ == "__main__":
    main()

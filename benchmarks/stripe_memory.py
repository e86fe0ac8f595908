"""Memory of a stripe: a listener and its dialers, each a process, with one bulk connection or many.

    python benchmarks/stripe_memory.py [--stripes 1,64] [--clients 1,4] [--mib 64] [--save FILE]

One JSON row for each number of clients and stripes, plain and under CURVE, over loopback. Resident
memory (VmRSS, Linux only) of the listener and of one dialer beyond what the same process held
before it had a connection, in bytes:

  * `..._open`: every connection is up and known to the other side, a stream of 16 KiB went each
    way, and then --quiet seconds.
  * `..._used`: after `--mib` more each way, in chunks of 1 MiB, from each client, one client after
    another; then --quiet seconds.
  * `..._most`: the peak.

`listener_per_stripe` and `dialer_per_stripe` are the differences to the row with the fewest stripes
of the same kind, open and used, for each stripe more of one client. Memory that the kernel holds
for a connection is not included. Nothing is stored: a sink drops its data, a source has one chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import fsl_transport as tp
from fsl_transport.loop import run
from fsl_transport.zmq.curve import DialerCurve, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

SMALL_BYTES, CHUNK_BYTES = 16 << 10, 1 << 20
ANSWER_S = 120.0


class Sink:
    """Takes chunks and forgets them."""

    def write(self, index: int, data: tp.Buffer, done: Any) -> None:
        """Report at once that it is written."""
        done(True)


class Source:
    """The same chunk again and again."""

    def __init__(self, data: bytes, chunks: int) -> None:
        self.chunks = chunks
        self._data = data

    def read(self, index: int, deliver: Any) -> None:
        """Deliver at once."""
        deliver(self._data)


def resident() -> dict[str, int]:
    """VmRSS and VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {
        key: 1024 * int(found[name].split()[0])
        for key, name in (("now", "VmRSS"), ("most", "VmHWM"))
    }


class End:
    """An endpoint that obeys a pipe: `connections`, `memory`, or a stream to a peer."""

    def __init__(self, pipe: Any, stripes: int) -> None:
        self.pipe = pipe
        self.settings = tp.TransportSettings(stripes_first=stripes, stripes_limit=stripes)
        self.endpoint: Any = None
        self.link: Any = None
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()

    def take(self, event: tp.TransportEvent) -> None:
        """One event of the transport."""
        if isinstance(event, tp.HelloReceived):
            self.endpoint.welcome(event.peer, {})
        elif isinstance(event, tp.StreamOffered):
            self.endpoint.accept(event.peer, event.stream_id, Sink())
        elif isinstance(event, tp.PeerUp | tp.StreamSent):
            self.pipe.send(type(event).__name__)

    async def serve(self) -> None:
        """Serve until the pipe asks to end."""
        threading.Thread(target=self._listen, daemon=True).start()
        await self.ended.wait()
        await self.endpoint.aclose()

    def _listen(self) -> None:
        while True:
            asked = self.pipe.recv()
            self.loop.call_soon_threadsafe(self._do, asked)
            if asked is None:
                return

    def _do(self, asked: Any) -> None:
        if asked is None:
            self.ended.set()
        elif asked == "memory":
            self.pipe.send(resident())
        elif asked == "connections":
            self.pipe.send(self.link.connections)
        elif asked == "connect":
            self.endpoint.connect(dict)
        else:
            peer, name, size, chunks = asked
            self.endpoint.offer(peer, name, {}, Source(os.urandom(size), chunks))


def listener(pipe: Any, stripes: int, pair: KeyPair | None) -> None:
    """The server's process."""

    async def main() -> None:
        end = End(pipe, stripes)
        curve = None if pair is None else ListenerCurve(pair, lambda _key: True)
        end.link = ZmqListener("127.0.0.1:0", end.settings, curve)
        end.endpoint = tp.ListenerEndpoint(end.link, end.loop, end.settings, end.take, "ps")
        pipe.send(end.link.port)
        await end.serve()

    run(main())


def dialer(pipe: Any, stripes: int, port: int, name: str, public: str) -> None:
    """A client's process."""

    async def main() -> None:
        end = End(pipe, stripes)
        curve = DialerCurve(KeyPair.new(), public) if public else None
        end.link = ZmqDialer(f"127.0.0.1:{port}", name, end.settings, curve)
        end.endpoint = tp.DialerEndpoint(
            end.link, end.loop, end.settings, end.take, name, incarnation=time.time_ns()
        )
        await end.serve()

    run(main())


class Party:
    """A process of this benchmark, as its parent has it."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, its = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(its, *arguments), daemon=True)
        self._process.start()
        self.before: dict[str, int] = {}

    def ask(self, what: Any) -> Any:
        """Send a request and return the answer."""
        self.pipe.send(what)
        return self.receive()

    def receive(self) -> Any:
        """Return the next answer."""
        if not self.pipe.poll(ANSWER_S):
            raise RuntimeError(f"no answer within {ANSWER_S:g} s")
        return self.pipe.recv()

    def close(self) -> None:
        """End it."""
        self.pipe.send(None)
        self._process.join(10)


def row_of(stripes: int, clients: int, mib: int, quiet_s: float, *, curve: bool) -> dict[str, Any]:
    """One row."""
    pair = KeyPair.new() if curve else None
    server = Party(listener, stripes, pair)
    port = server.receive()
    names = [f"c{number}" for number in range(clients)]
    public = "" if pair is None else pair.public
    parties = {name: Party(dialer, stripes, port, name, public) for name in names}
    all_parties = [server, *parties.values()]
    row: dict[str, Any] = {"bench": "stripe_memory", "stripes": stripes, "clients": clients}
    row |= {"curve": curve, "mib": mib}
    try:
        for party in all_parties:
            party.before = party.ask("memory")
        for party in parties.values():
            assert party.ask("connect") == "PeerUp"
            assert server.receive() == "PeerUp"
        for state, size, chunks in (("open", SMALL_BYTES, 1), ("used", CHUNK_BYTES, mib)):
            for name, party in parties.items():
                assert party.ask(("", state, size, chunks)) == "StreamSent"
                assert server.ask((name, state, size, chunks)) == "StreamSent"
            while server.ask("connections") < clients * (1 + stripes):
                time.sleep(0.05)
            time.sleep(quiet_s)
            for role, party in (("listener", server), ("dialer", parties[names[0]])):
                found = party.ask("memory")
                row[f"{role}_{state}"] = found["now"] - party.before["now"]
                row[f"{role}_most"] = found["most"] - party.before["now"]
        row["connections"] = server.ask("connections")
    finally:
        for party in reversed(all_parties):
            party.close()
    return row


def compared(row: dict[str, Any], least: dict[str, Any]) -> dict[str, Any]:
    """The same row, with the cost of each stripe beyond those of the row with the fewest."""
    more = row["stripes"] - least["stripes"]
    if more == 0:
        return row
    for role, many in (("listener", row["clients"]), ("dialer", 1)):
        for state in ("open", "used"):
            grown = row[f"{role}_{state}"] - least[f"{role}_{state}"]
            row[f"{role}_per_stripe_{state}"] = round(grown / more / many)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stripes", default="1,64")
    parser.add_argument("--clients", default="1,4")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--quiet", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    stripes = sorted(int(word) for word in options.stripes.split(","))
    for curve in (False, True):
        for clients in map(int, options.clients.split(",")):
            least: dict[str, Any] = {}
            for count in stripes:
                row = row_of(count, clients, options.mib, options.quiet, curve=curve)
                least = least or row
                line = json.dumps(compared(row, least))
                print(line, flush=True)
                if options.save is not None:
                    with options.save.open("a") as rows:
                        rows.write(line + "\n")


if __name__ == "__main__":
    main()

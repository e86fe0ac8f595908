"""What a relay costs on loopback: a message there and back, and a stream, direct and relayed.

The ends and the relays are processes of the production code (`ListenerEndpoint`, `nodes/relay`,
`DialerEndpoint`), set up as `fsl-node` does: the ends keep freed blocks (`process/memory.py`). The
ways take turns, `--rounds` times. One JSON row for each, with medians:

    round_trip_us       a control message and its echo
    bytes_per_s         from the offer of a stream until its last chunk is written
    added_us, ratio     against the direct way with the same encryption
    ends_cpu_s_per_gb   processor time of a GB of the stream, at both ends together,
    relay_cpu_s_per_gb  and at each relay (Linux only, else null)

On few cores the ratio also includes the processor time of one more process; `cores` is on the row.

    python benchmarks/relay.py [--mib 256] [--rounds 3] [--relays 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import fsl_transport as tp
from fsl_async.nodes.relay.relay import Route, serve
from fsl_async.process.memory import keep_freed_blocks
from fsl_async.process.stopper import Stopper
from fsl_transport.loop import run
from fsl_transport.zmq.curve import DialerCurve, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

CHUNK_BYTES = 1 << 20
MESSAGES = 200
UP_S = 30.0


class Sink:
    """Takes chunks and forgets them."""

    def write(self, index: int, data: tp.Buffer, done: Any) -> None:
        """Report at once that it is written."""
        done(True)


class Source:
    """The same chunk again and again."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._data = os.urandom(CHUNK_BYTES)

    def read(self, index: int, deliver: Any) -> None:
        """Deliver at once."""
        deliver(self._data)


def server(port: Any, pair: KeyPair | None) -> None:
    """Echo messages and take streams, for ever."""
    keep_freed_blocks()

    async def main() -> None:
        curve = None if pair is None else ListenerCurve(pair, lambda _key: True)
        link = ZmqListener("127.0.0.1:0", None, curve)

        def on_event(event: tp.TransportEvent) -> None:
            if isinstance(event, tp.HelloReceived):
                endpoint.welcome(event.peer, {})
            elif isinstance(event, tp.StreamOffered):
                endpoint.accept(event.peer, event.stream_id, Sink())
            elif isinstance(event, tp.MessageReceived):
                endpoint.send(event.peer, event.body)

        loop = asyncio.get_running_loop()
        endpoint = tp.ListenerEndpoint(link, loop, tp.TransportSettings(), on_event, "ps")
        port.put(link.port)
        await asyncio.Event().wait()

    run(main())


def relay(port: Any, upstream: int, requires_curve: bool) -> None:
    """Forward, for ever."""
    serve(
        [Route("tcp://127.0.0.1:0", f"tcp://127.0.0.1:{upstream}", requires_curve)],
        run_dir=None,
        announce=lambda bound: port.put(bound[0][1]),
        tell=lambda _note: None,
        stop=Stopper(),
    )


def processor_s(process: int) -> float:
    """Processor seconds that a process has used so far; NaN where they are not reported."""
    try:
        words = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def congestion() -> str:
    """Return the congestion control that the ends use: pacing matters on loopback too."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text("ascii").strip()
    except OSError:
        return ""


def measure(
    port: int, server_key: str | None, chunks: int, ends: list[int], relays: list[int]
) -> tuple[float, float, float, float]:
    """Return the median round trip of a message in seconds, and of a stream bytes a second.

    Then its processor seconds for a GB, at both ends together and at each relay.
    """

    async def main() -> tuple[float, float, float, float]:
        loop = asyncio.get_running_loop()
        happened: dict[type, asyncio.Event] = {
            kind: asyncio.Event() for kind in (tp.PeerUp, tp.MessageReceived, tp.StreamSent)
        }

        def on_event(event: tp.TransportEvent) -> None:
            if type(event) in happened:
                happened[type(event)].set()

        curve = None if server_key is None else DialerCurve(KeyPair.new(), server_key)
        link = ZmqDialer(f"127.0.0.1:{port}", "c", None, curve)
        endpoint = tp.DialerEndpoint(
            link, loop, tp.TransportSettings(), on_event, "c", incarnation=time.time_ns()
        )
        endpoint.connect(dict)
        await asyncio.wait_for(happened[tp.PeerUp].wait(), UP_S)
        trips = []
        for number in range(MESSAGES):
            begun = time.perf_counter()
            happened[tp.MessageReceived].clear()
            endpoint.send("", {"number": number})
            await happened[tp.MessageReceived].wait()
            trips.append(time.perf_counter() - begun)
        for stream in ("warm", "measured"):
            happened[tp.StreamSent].clear()
            before = [sum(map(processor_s, group)) for group in (ends, relays)]
            begun = time.perf_counter()
            endpoint.offer("", stream, {}, Source(chunks))
            await happened[tp.StreamSent].wait()
            seconds = time.perf_counter() - begun
        gigabytes = chunks * CHUNK_BYTES / 1e9
        used = [
            sum(map(processor_s, group)) - was
            for group, was in zip((ends, relays), before, strict=True)
        ]
        endpoint.disconnect()
        await endpoint.aclose()
        return (
            statistics.median(trips),
            1e9 * gigabytes / seconds,
            used[0] / gigabytes,
            used[1] / gigabytes / max(1, len(relays)),
        )

    return run(main())


def _rounded(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds, 2)


def main() -> None:
    """Start everything, measure in turns, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--relays", type=int, default=1, help="in a row, at most")
    given = parser.parse_args()
    keep_freed_blocks()
    context = multiprocessing.get_context("spawn")
    processes = []

    def start(function: Any, *arguments: Any) -> int:
        port = context.Queue()
        process = context.Process(target=function, args=(port, *arguments), daemon=True)
        process.start()
        processes.append(process)
        return int(port.get(timeout=60))

    def last() -> int:
        return int(processes[-1].pid or 0)

    ways = []
    for pair in (None, KeyPair.new()):
        port = start(server, pair)
        ends = [os.getpid(), last()]
        between: list[int] = []
        for relays in range(given.relays + 1):
            if relays:
                port = start(relay, port, pair is not None)
                between = [*between, last()]
            ways.append((pair, port, ends, between))
    results: dict[tuple[bool, int], list[tuple[float, ...]]] = {}
    for _ in range(given.rounds):
        for pair, port, ends, between in ways:
            key = None if pair is None else pair.public
            found = measure(port, key, given.mib, ends, between)
            results.setdefault((pair is not None, len(between)), []).append(found)
    for process in processes:
        process.terminate()
        process.join()
    middle = {
        way: tuple(statistics.median(column) for column in zip(*found, strict=True))
        for way, found in results.items()
    }
    for (curve, relays), (trip_s, rate, ends_s, relay_s) in middle.items():
        direct_trip_s, direct_rate, *_ = middle[curve, 0]
        row = {
            "relays": relays,
            "curve": curve,
            "round_trip_us": round(trip_s * 1e6),
            "added_us": round((trip_s - direct_trip_s) * 1e6),
            "bytes_per_s": round(rate),
            "ratio": round(rate / direct_rate, 3),
            "ends_cpu_s_per_gb": _rounded(ends_s),
            "relay_cpu_s_per_gb": _rounded(relay_s) if relays else None,
            "mib": given.mib,
            "rounds": given.rounds,
            "cores": os.cpu_count(),
            "congestion": congestion(),
            "load_1m": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

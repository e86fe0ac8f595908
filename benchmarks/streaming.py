"""Streams a vector into another process's accumulator: all stages at once, beside each alone.

    python benchmarks/streaming.py                       32 M values, e4m3 and uniform, loopback
    python benchmarks/streaming.py --values 8 --format bf16

The sender encodes a chunk in a thread when the transport asks for it, the receiver adds it in a
thread while the next ones arrive, as for a client's delta and for uploads to a split server. A row
is the median over --rounds, all ways in turns:
    encode_s, accumulate_s   all chunks, alone, in the process that does it
    wire_s                   chunks that are already coded, to a receiver that drops them
    streamed_s               all stages at once, from the offer until the last chunk is added
    overlap                  (encode_s + wire_s + accumulate_s) / streamed_s: 1 for no overlap
    over_slowest             streamed_s / the largest of the three: 1 for full overlap
Seconds are wall-clock; both processes and the transport's own threads share the machine's cores: on
loopback sending is processor time too, and leaves no wait to overlap with. A link of 1 Gbit/s
without another machine:
    unshare -n sh -c 'ip link set lo up
        tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 100ms
        exec python benchmarks/streaming.py'
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from attrs import frozen

import fsl_transport as tp
from fsl_async.nodes.runtime import ThreadWorker
from fsl_async.nodes.wire import Source
from fsl_codecs import CodecSpec, bound, decode_accumulate, encode_into
from fsl_transport.loop import run as run_loop
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

CHUNK_VALUES = 131072
WAYS = {"wire_s": (False, False), "streamed_s": (True, True)}
"""Whether the sender encodes, and whether the receiver adds."""


class Encoder:
    """Encodes chunks as the runtime does: into one buffer, then into bytes of their size."""

    def __init__(self, values: np.ndarray, number_format: str) -> None:
        self.chunks = values.size // CHUNK_VALUES
        self.encode_s = 0.0
        self.kept: list[bytes] = []
        self._values, self._spec = values, CodecSpec(format=number_format)
        self._room = bytearray(bound(CHUNK_VALUES, self._spec))

    def encode(self, index: int) -> bytes:
        """One chunk."""
        part = self._values[index * CHUNK_VALUES : (index + 1) * CHUNK_VALUES]
        return bytes(memoryview(self._room)[: encode_into(part, self._room, self._spec)])

    def encode_alone(self) -> None:
        """All chunks; keeps them and the time."""
        begun = time.perf_counter()
        self.kept = [self.encode(index) for index in range(self.chunks)]
        self.encode_s = time.perf_counter() - begun


@frozen
class Kept:
    """Chunks that are already coded."""

    _frames: list[bytes]

    @property
    def chunks(self) -> int:
        """See `ChunkSource`."""
        return len(self._frames)

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """See `ChunkSource`."""
        deliver(self._frames[index])


class Sink:
    """Adds chunks, or drops them."""

    def __init__(self, accumulator: np.ndarray, ended: Callable[[], None]) -> None:
        self.adds = True
        self.left = 0
        self.kept: list[bytes] = []
        self._accumulator, self._ended = accumulator, ended
        self._worker = ThreadWorker(asyncio.get_running_loop(), "add")

    def add(self, index: int, data: tp.Buffer) -> None:
        """One chunk."""
        start = index * CHUNK_VALUES
        decode_accumulate(data, self._accumulator[start : start + CHUNK_VALUES], 0.5)

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """See `ChunkSink`."""
        if not self.adds:
            if len(self.kept) < self._accumulator.size // CHUNK_VALUES:
                self.kept.append(bytes(data))
            self._finish(done)
            return
        self._worker.submit(lambda: self.add(index, data), lambda _: self._finish(done), _fail)

    def _finish(self, done: Callable[[bool], None]) -> None:
        done(True)
        self.left -= 1
        if self.left == 0:
            self._ended()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def accumulate_alone(self) -> float:
        """Seconds for all chunks that were kept."""
        begun = time.perf_counter()
        for index, data in enumerate(self.kept):
            self.add(index, data)
        return time.perf_counter() - begun


def _fail(error: Exception) -> None:
    raise error


async def send(port: int, values: int, number_format: str) -> None:
    """The sender's process: offers the streams that the receiver asks for."""
    vector = np.random.default_rng(0).standard_normal(values, dtype=np.float32)
    encoder = Encoder(vector, number_format)
    worker = ThreadWorker(asyncio.get_running_loop(), "encode")
    settings = tp.TransportSettings()
    ended = asyncio.Event()

    def take(event: tp.TransportEvent) -> None:
        if isinstance(event, tp.MessageReceived):
            if event.body["stream"] == "end":
                ended.set()
            elif event.body["stream"] == "encode":
                encoder.encode_alone()
                dialer.send("", {"encode_s": encoder.encode_s})
            else:
                source: tp.ChunkSource = Kept(encoder.kept)
                if event.body["codes"]:
                    source = Source(encoder.chunks, worker, encoder.encode)
                dialer.offer("", str(event.body["stream"]), {}, source)

    link = ZmqDialer(f"127.0.0.1:{port}", "sender", settings)
    dialer = tp.DialerEndpoint(
        link, asyncio.get_running_loop(), settings, take, "sender", incarnation=1
    )
    dialer.connect(dict)
    await ended.wait()
    dialer.close()
    worker.close()


class Receiver:
    """The listening process, which keeps the time."""

    def __init__(self, values: int) -> None:
        self.settings = tp.TransportSettings()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._ended = asyncio.Event()
        self.sink = Sink(np.zeros(values, np.float32), self._ended.set)
        self.chunks = values // CHUNK_VALUES
        self.link = ZmqListener("127.0.0.1:0", self.settings)
        self.endpoint = tp.ListenerEndpoint(
            self.link,
            asyncio.get_running_loop(),
            self.settings,
            self.take,
            "receiver",
            incarnation=1,
        )
        self._up = asyncio.Event()

    def take(self, event: tp.TransportEvent) -> None:
        """One event of the transport."""
        if isinstance(event, tp.HelloReceived):
            self.endpoint.welcome(event.peer, {})
        elif isinstance(event, tp.PeerUp):
            self._up.set()
        elif isinstance(event, tp.MessageReceived):
            self._inbox.put_nowait(dict(event.body))
        elif isinstance(event, tp.StreamOffered):
            self.endpoint.accept(event.peer, event.stream_id, self.sink)

    def close(self) -> None:
        """Close the endpoint and its worker."""
        self.endpoint.close()
        self.sink.close()

    async def up(self) -> None:
        """Wait for the sender."""
        await self._up.wait()

    async def one_round(self, number: int) -> dict[str, float]:
        """Run every way once."""
        self.endpoint.send("sender", {"stream": "encode"})
        found = {"encode_s": float((await self._inbox.get())["encode_s"])}
        for name, (codes, adds) in WAYS.items():
            self.sink.adds, self.sink.left = adds, self.chunks
            self._ended.clear()
            begun = time.perf_counter()
            self.endpoint.send("sender", {"stream": f"{name}{number}", "codes": codes})
            await self._ended.wait()
            found[name] = time.perf_counter() - begun
        found["accumulate_s"] = self.sink.accumulate_alone()
        return found


async def measure(values: int, number_format: str, rounds: int) -> dict[str, Any]:
    """A row."""
    receiver = Receiver(values)
    words = [sys.executable, __file__, "--send-to", str(receiver.link.port)]
    words += ["--values", str(values / 1e6), "--format", number_format]
    sender = await asyncio.create_subprocess_exec(*words)
    await receiver.up()
    await receiver.one_round(-1)  # warms up
    found = [await receiver.one_round(number) for number in range(rounds)]
    receiver.endpoint.send("sender", {"stream": "end"})
    await sender.wait()
    receiver.close()
    row = {name: statistics.median(one[name] for one in found) for name in found[0]}
    parts = ("encode_s", "wire_s", "accumulate_s")
    overlap = [sum(one[part] for part in parts) / one["streamed_s"] for one in found]
    over = [one["streamed_s"] / max(one[part] for part in parts) for one in found]
    return {
        "bench": "streaming",
        "format": number_format,
        "values": values,
        "coded_mb": round(sum(map(len, receiver.sink.kept)) / 1e6, 1),
        **{name: round(seconds, 4) for name, seconds in row.items()},
        "overlap": round(statistics.median(overlap), 2),
        "over_slowest": round(statistics.median(over), 2),
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


@click.command()
@click.option("--values", "millions", default=32.0, show_default=True, help="In millions.")
@click.option("--format", "formats", multiple=True, default=("e4m3", "uniform"), show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--send-to", "port", default=0, hidden=True)
def main(millions: float, formats: tuple[str, ...], rounds: int, port: int) -> None:
    """Print a row for each format."""
    values = max(1, round(millions * 1e6 / CHUNK_VALUES)) * CHUNK_VALUES
    if port:
        run_loop(send(port, values, formats[0]))
        return
    for number_format in formats:
        click.echo(json.dumps(run_loop(measure(values, number_format, rounds))))


if __name__ == "__main__":
    main()

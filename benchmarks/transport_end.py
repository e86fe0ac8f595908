"""One end of one transfer: a process of benchmarks/transport.py.

    fsl      fsl_transport through its public API: a listener and a dialer, one endless stream
    tcp      a plain asyncio stream, which does nothing but move chunks: the limit
    pyzmq    bare sockets, which do nothing but move chunks
    grpc     grpc.aio without protobuf: bytes in, bytes out, one client stream

All ends use the event loop that nodes use, and all but fsl the default heap.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq
import zmq.asyncio
from transport_task import Meter, Task, end_with_input, say, task_of

import fsl_transport as tp
from fsl_async.process.memory import keep_freed_blocks
from fsl_transport.loop import run as run_loop
from fsl_transport.zmq.curve import DialerCurve, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

ENDLESS = 1 << 40
PING_EVERY_S = 0.1
READ_BYTES = 1 << 18
"""Of the plain stream, with the usual limit of a StreamReader: larger ones were slower."""
MESSAGES_WAITING = 16
"""High-water mark of bare pyzmq on both sides; its default of 1000 is slower, because memory is
touched once and not again."""


class Source:
    """An endless source of the same chunk."""

    chunks = ENDLESS

    def __init__(self, size: int) -> None:
        self._data = bytes(size)

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """See `ChunkSource`."""
        deliver(self._data)


class Sink:
    """Counts payload and discards it."""

    def __init__(self, meter: Meter, ended: asyncio.Event) -> None:
        self._meter = meter
        self._ended = ended

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """See `ChunkSink`."""
        if self._meter.add(len(data)):
            self._ended.set()
        done(True)


class End:
    """An endpoint and what it does about events."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.meter = Meter(task)
        self.ended = asyncio.Event()
        self.delays: list[float] = []
        self.endpoint: Any = None
        self._pinging: asyncio.Task[None] | None = None

    def take(self, event: tp.TransportEvent) -> None:
        """One event of the transport."""
        endpoint, task = self.endpoint, self.task
        if isinstance(event, tp.HelloReceived):
            endpoint.welcome(event.peer, {})
        elif isinstance(event, tp.PeerUp) and task.sends:
            endpoint.offer(event.peer, "bench", {}, Source(task.chunk_bytes))
            if task.pings:
                self._pinging = asyncio.ensure_future(self._ping(event.peer))
        elif isinstance(event, tp.StreamOffered):
            endpoint.accept(event.peer, event.stream_id, Sink(self.meter, self.ended))
        elif isinstance(event, tp.MessageReceived):
            self.delays.append(time.monotonic() - event.body["at"])
        elif isinstance(event, tp.PeerDown) and task.sends:
            self.ended.set()

    async def _ping(self, peer: str) -> None:
        # Both ends must be on one machine: then they have the same monotonic clock.
        while True:
            self.endpoint.send(peer, {"at": time.monotonic()})
            await asyncio.sleep(PING_EVERY_S)

    async def run(self) -> None:
        """Run until the time is over, or the peer is gone."""
        task = self.task
        loop = asyncio.get_running_loop()
        settings = tp.TransportSettings(
            stripes_first=task.stripes or 1, stripes_limit=task.stripes or tp.STRIPES_LIMIT
        )
        listens = task.sends == task.down
        keys = KeyPair(*task.keys) if task.keys is not None else None
        if listens:
            allowed = ListenerCurve(keys, lambda _key: True) if keys else None
            link = ZmqListener(f"{task.address}:{task.port}", settings, allowed)
            self.endpoint = tp.ListenerEndpoint(
                link, loop, settings, self.take, "server", incarnation=1
            )
            say(port=link.port)
        else:
            curve = DialerCurve(KeyPair.new(), keys.public) if keys else None
            dialer = ZmqDialer(f"{task.address}:{task.port}", "bench", settings, curve)
            self.endpoint = tp.DialerEndpoint(
                dialer, loop, settings, self.take, "bench", incarnation=1
            )
            self.endpoint.connect(dict)
        await self.ended.wait()
        if not task.sends:
            delays, found = sorted(self.delays), self.meter.result()
            if delays:
                found["control_worst_s"] = delays[-1]
                found["control_median_s"] = delays[len(delays) // 2]
            say(**found, controls=len(delays))
        if self._pinging is not None:
            self._pinging.cancel()
        self.endpoint.close()


async def tcp(task: Task) -> None:
    """Send without end, or receive until the time is over."""
    if task.sends:
        _, writer = await asyncio.open_connection(task.address, task.port)
        data = bytes(task.chunk_bytes)
        with contextlib.suppress(ConnectionError):  # the receiver is done
            while True:
                writer.write(data)
                await writer.drain()
        return
    meter, ended = Meter(task), asyncio.Event()

    async def take(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            if meter.add(len(data)):
                ended.set()
                return

    server = await asyncio.start_server(take, task.address, task.port)
    say(port=server.sockets[0].getsockname()[1])
    await ended.wait()
    say(**meter.result())


async def pyzmq(task: Task) -> None:
    """A dealer and a router."""
    context = zmq.asyncio.Context()
    socket: zmq.asyncio.Socket = context.socket(zmq.DEALER if task.sends else zmq.ROUTER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = MESSAGES_WAITING
    if task.keys is not None and task.sends:
        public, secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_serverkey = task.keys[0].encode()
    elif task.keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = task.keys[1].encode()
    if task.sends:
        socket.connect(f"tcp://{task.address}:{task.port}")
        data = bytes(task.chunk_bytes)
        while True:
            await socket.send(data, copy=False)
    socket.bind(f"tcp://{task.address}:{task.port}")
    bound = bytes(socket.getsockopt(zmq.LAST_ENDPOINT))
    say(port=int(bound.rstrip(b"\0").rpartition(b":")[2]))
    meter = Meter(task)
    while True:
        frames: list[Any] = await socket.recv_multipart(copy=False)
        if meter.add(len(frames[-1])):
            break
    say(**meter.result())
    context.destroy(0)


async def grpc_aio(task: Task) -> None:
    """One stream of requests, without an answer until its end."""
    grpc: Any = importlib.import_module("grpc")  # may not be installed, and ships no types
    grpc.aio = importlib.import_module("grpc.aio")
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
    ]
    if task.sends:

        async def chunks() -> AsyncIterator[bytes]:
            data = bytes(task.chunk_bytes)
            while True:
                yield data

        place = f"{task.address}:{task.port}"
        async with grpc.aio.insecure_channel(place, options=options) as channel:
            await channel.stream_unary("/bench/Send")(chunks())
        return
    meter, ended = Meter(task), asyncio.Event()

    async def take(requests: AsyncIterator[bytes], _context: Any) -> bytes:
        async for data in requests:
            if meter.add(len(data)):
                ended.set()
                break
        return b""

    handlers = {"Send": grpc.stream_unary_rpc_method_handler(take)}
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    say(port=server.add_insecure_port(f"{task.address}:{task.port}"))
    await server.start()
    await ended.wait()
    say(**meter.result())
    await server.stop(0)


async def fsl(task: Task) -> None:
    """Use the transport."""
    await End(task).run()


_WAYS = {"fsl": fsl, "tcp": tcp, "pyzmq": pyzmq, "grpc": grpc_aio}


def main() -> None:
    """Do the task of the first argument."""
    task = task_of(sys.argv[1])
    end_with_input()
    if task.way == "fsl":
        keep_freed_blocks()  # as nodes do
    run_loop(_WAYS[task.way](task))


if __name__ == "__main__":
    main()

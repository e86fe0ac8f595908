"""Bare pyzmq and grpc.aio beside fsl_transport, each doing nothing but moving chunks.

    python benchmarks/transport_peers.py TASK    one end of a transfer, for benchmarks/transport.py

grpc.aio is measured without protobuf: bytes in, bytes out, one client stream. Both use the event
loop that nodes use, and both are measured with their default heap.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import zmq
import zmq.asyncio
from transport_task import Meter, Task, end_with_input, say, task_of

from fsl_transport.loop import run as run_loop

MESSAGES_WAITING = 16
"""High-water mark of bare pyzmq on both sides; its default of 1000 is slower, because memory is
touched once and not again."""


async def _pyzmq(task: Task) -> None:
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


async def _grpc(task: Task) -> None:
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


_WAYS: dict[str, Callable[[Task], Coroutine[Any, Any, None]]] = {"pyzmq": _pyzmq, "grpc": _grpc}


def main() -> None:
    """Do the task of the first argument."""
    task = task_of(sys.argv[1])
    end_with_input()
    run_loop(_WAYS[task.way](task))


if __name__ == "__main__":
    main()

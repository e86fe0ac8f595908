"""One direction of a relayed connection: tests that need a forwarder alone."""

import asyncio
import contextlib
import errno
import socket
import struct

import pytest

from fsl_transport.loop import run
from fsl_transport.relay import buffer as buffers
from fsl_transport.relay import forwarder
from fsl_transport.relay.buffer import CopyBuffer, PipeBuffer, PipePool
from fsl_transport.relay.forwarder import Forwarder

needs_splice = pytest.mark.skipif(not buffers.can_splice(), reason="this system has no splice")
BOTH = pytest.mark.parametrize("splices", [pytest.param(True, marks=needs_splice), False])


@contextlib.asynccontextmanager
async def forwarding(pair):
    """Make a forwarder from the source to the target; returns it and the pool of its buffers."""
    pipes = PipePool()
    one = Forwarder(asyncio.get_running_loop(), pipes, pair[1], pair[2])
    try:
        yield one, pipes
    finally:
        one.close()
        pipes.close()


async def read(connection, size):
    """Read so many bytes, or all until the end."""
    got, loop = bytearray(), asyncio.get_running_loop()
    while len(got) < size and (data := await loop.sock_recv(connection, size - len(got))):
        got += data
    return bytes(got)


@BOTH
@pytest.mark.parametrize("ends", [False, True])
def test_urgent_data_is_left_out_and_holds_nothing_up(pair, monkeypatch, splices, ends):
    """MSG_OOB stops splice at its place: the bytes behind it are forwarded, and no loop spins."""
    client, _, _, server = pair
    if not splices:
        monkeypatch.setattr(buffers, "can_splice", lambda: False)
    fills = []
    for kind in (PipeBuffer, CopyBuffer):

        def fill(buffer, connection, real=kind.fill):
            fills.append(None)
            assert len(fills) < 40, "it spins"
            return real(buffer, connection)

        monkeypatch.setattr(kind, "fill", fill)

    def send():
        client.send(b"12345")
        client.send(b"x", socket.MSG_OOB)
        client.send(b"hello")

    async def main():
        if ends:
            send()
            client.shutdown(socket.SHUT_WR)
        async with forwarding(pair) as (one, _):
            for _ in range(1 if ends else 3):
                if not ends:
                    send()
                async with asyncio.timeout(20):
                    assert await read(server, 10) == b"12345hello"
            if ends:
                assert await asyncio.wait_for(one.over, 20) is None
                assert await read(server, 1) == b"", "the end is passed on"
            else:
                client.send(b"x", socket.MSG_OOB)  # no bytes behind it
                await asyncio.sleep(0.05)
            assert one.carried == (10 if ends else 30)
            assert one.held == 0

    run(main())


@BOTH
def test_what_came_before_a_reset_passes_in_more_than_one_turn(pair, monkeypatch, splices):
    """Event loops (libuv) stop watching a socket after an error on it, though more can be read."""
    client, _, _, server = pair
    monkeypatch.setattr(forwarder, "_TURN_BYTES", 4096)
    if not splices:
        monkeypatch.setattr(buffers, "can_splice", lambda: False)
        monkeypatch.setattr(buffers, "COPY_BYTES", 4096)
    monkeypatch.setattr(buffers, "PIPE_BYTES", 4096)
    sent = client.send(bytes(100_000))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def main():
        await asyncio.sleep(0.1)
        client.close()
        async with forwarding(pair) as (one, _):
            assert await asyncio.wait_for(read(server, 1 << 20), 20) == bytes(sent)
            assert isinstance(await one.over, ConnectionResetError | None)

    run(main())


def test_a_target_that_breaks_ends_it(pair):
    """It ends with the error; bytes already read for it are lost."""
    client, _, _, server = pair

    async def main():
        async with forwarding(pair) as (one, _):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            server.close()
            await asyncio.sleep(0.05)
            client.send(b"too late")
            assert isinstance(await asyncio.wait_for(one.over, 20), OSError)
            assert one.held == 0

    run(main())


@pytest.mark.parametrize("why", ["no splice", "no descriptor"])
def test_where_there_is_no_pipe_it_copies(monkeypatch, why):
    """As on another system, or without a free descriptor."""

    def fail():
        raise OSError(errno.EMFILE, "too many open files")

    if why == "no splice":
        monkeypatch.setattr(buffers, "can_splice", lambda: False)
    else:
        monkeypatch.setattr(buffers, "PipeBuffer", type("None", (), {"__init__": lambda _: fail()}))
    assert type(PipePool().take()) is CopyBuffer


@pytest.fixture
def pair():
    """Two connections: what is written to the first end can be read from the source, what the
    target receives from the last end.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = []
        for _ in range(2):
            ends.append(socket.create_connection(listener.getsockname()))
            ends.append(listener.accept()[0])
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()

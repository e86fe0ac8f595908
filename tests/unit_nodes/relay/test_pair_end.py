"""The end of a pair of connections: bytes sent before are delivered, within a time limit."""

import asyncio
import contextlib
import socket
import struct

import pytest

from fsl_async.nodes.relay import pair
from fsl_transport.loop import run

RESETS = struct.pack("ii", 1, 0)


@pytest.mark.parametrize("side", ["client", "server"])
def test_an_end_on_one_side_ends_the_other(relayed, side):
    """A client must not wait if its server is gone. The first end is the reason."""

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            here, there = (near, far) if side == "client" else (far, near)
            here.send(b"last words")
            here.close()
            assert await one.read(there) == b"last words"
            there.close()
            assert (await one.ended())["reason"] == f"the {side} closed it"
            assert one.relay._pairs == {}

    run(main())


@pytest.mark.parametrize("side", ["client", "server"])
def test_bytes_before_a_reset_are_delivered(relayed, side):
    """A refusal is often sent right before a reset."""

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            here, there = (near, far) if side == "client" else (far, near)
            await one.fill(here)
            up, down, held = one.relay.carried()
            passed = (up - 64 if side == "client" else down) + held
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            here.close()
            assert len(await one.read(there)) >= passed > 0
            there.close()
            await one.ended()

    run(main())


def test_a_client_that_still_sends_gets_the_last_bytes_of_the_server(relayed):
    """The client's heartbeat must not reset its connection before it has read the reason."""

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            await one.fill(far)
            _, down, held = one.relay.carried()
            far.close()
            for _ in range(3):
                near.send(b"beat")
                await asyncio.sleep(0.1)
            got = 0
            while data := await asyncio.get_running_loop().sock_recv(near, 1 << 16):
                got += len(data)
                near.send(b"beat")
            assert got >= down + held > 100_000

    run(main())


def test_the_other_direction_may_finish(relayed):
    """Bytes of the server arrive after the client has finished sending."""

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            near.shutdown(socket.SHUT_WR)
            assert await one.read(far) == b""
            await asyncio.sleep(0.1)
            far.send(b"last words")
            far.close()
            assert await one.read(near) == b"last words"
            assert (await one.ended())["reason"] == "the client closed it"

    run(main())


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_peer_that_neither_reads_nor_closes_is_dropped(relayed, monkeypatch, side):
    """Its place is needed when the client dials again."""
    monkeypatch.setattr(pair, "LINGER_S", 0.3)

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            here, there = (near, far) if side == "client" else (far, near)
            await one.fill(there)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            here.close()
            await one.ended(2.0)

    run(main())


def test_a_server_that_ends_before_the_greeting_is_complete(relayed):
    """Later bytes of the client are discarded."""

    async def main():
        async with relayed() as one:
            near = await one.near(b"\xff" + bytes(8) + b"\x7f\3\1")
            far = await one.far()
            assert len(await one.read(far, 10)) == 10
            far.close()
            assert await one.read(near) == b""
            with contextlib.suppress(OSError):
                near.send(bytes(52))
            near.close()
            await one.ended()

    run(main())


def test_connections_that_were_just_accepted_are_closed_with_the_relay(relayed):
    """Their tasks may not have begun."""

    async def main():
        async with relayed() as one:
            near = await one.near()
            (port,) = one.relay._ports
            one.relay._accept(port)
            await one.relay.aclose()
            with contextlib.suppress(ConnectionError):
                assert await one.read(near) == b""
            assert near.fileno() >= 0

    run(main())

"""What a connection holds of the system's memory, and which lines of a relay hold much."""

import asyncio
import contextlib
import socket
import struct
import sys

import pytest

from fsl_transport.loop import run
from fsl_transport.relay import socket_memory as weight
from fsl_transport.relay.buffer import TANK_BYTES, PipeTank, TankPool, can_splice
from fsl_transport.relay.relay import Switchboard

GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
unix = pytest.mark.skipif(sys.platform == "win32", reason="says what is in a socket")


@pytest.fixture
def pair():
    """A connection, both ends."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        near.setblocking(False)
        yield near, far


def fill(connection):
    """As much as it takes; returns how much."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += connection.send(bytes(1 << 16))
    return sent


@unix
@pytest.mark.parametrize("platform", [sys.platform, "freebsd", "an older linux", "an odd linux"])
def test_what_waits_weighs_at_least_as_much_as_it_is(pair, monkeypatch, platform):
    """On both sides together; where the kernel does not say it, by what is known of the payload."""
    if platform == "an older linux":
        monkeypatch.setattr(weight, "_SO_MEMINFO", 9999)
    elif platform == "an odd linux":
        monkeypatch.setattr(weight, "_SO_MEMINFO", socket.SO_SNDBUF)
    else:
        monkeypatch.setattr(sys, "platform", platform)
    near, far = pair
    assert weight.of(near) + weight.of(far) < 16 << 10
    sent = fill(near)
    assert sent > 100_000
    assert weight.unsent(near) + weight.unread(far) >= sent
    assert weight.unread(near) == weight.unsent(far) == 0
    assert sent <= weight.of(near) + weight.of(far) < 8 * sent
    if platform != sys.platform:
        assert weight.of(near) == 2 * weight.unsent(near)
        assert weight.of(far) == 2 * weight.unread(far)
    assert weight.of(near)
    assert weight.of(far)
    left = sent
    while left:
        left -= len(far.recv(1 << 20))
    assert weight.of(far) < 16 << 10
    near.close()
    assert weight.of(near) == 0


@unix
def test_where_nobody_says_it_nothing_is_known(pair, monkeypatch):
    """On Windows, and of what is no TCP connection; Darwin says what was not sent in words of its own."""
    near, far = pair
    fill(near)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(weight, "_SO_NWRITE", 9999)
    assert weight.unsent(near) == 0
    assert weight.of(far) == 2 * weight.unread(far) > 0
    monkeypatch.setattr(weight, "_SO_NWRITE", socket.SO_SNDBUF)
    assert weight.unsent(near) == near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert weight.unread(far) == 0
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert weight.unsent(listener) == weight.unread(listener) == 0


def test_what_a_tank_takes(pair):
    """A buffer is there as a whole, whatever is left in it; a pipe has pages for what is inside."""
    near, far = pair
    near.send(bytes(1000))
    far.setblocking(True)
    tank = TankPool().take_buffer()
    assert tank.fill(far) == 1000
    assert tank.weight == TANK_BYTES
    if can_splice():
        near.send(bytes(1000))
        pipe = PipeTank()
        pipe.fill(far)
        assert pipe.weight == pipe.held == 1000
        pipe.close()


@unix
def test_what_is_set_aside_is_no_memory_yet(monkeypatch):
    """Nor what was dropped; what is counted is what came, what is to go, and what waits for the lock."""

    class Told:
        def getsockopt(self, *_):
            return struct.pack(
                "9i", 1, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 20, 1 << 20, 300, 1 << 20
            )

    monkeypatch.setattr(sys, "platform", "linux")
    assert weight.of(Told()) == 321


@unix
def test_a_line_that_stands_is_heavy_and_a_quiet_one_is_not_told(new_porter, monkeypatch):
    """With what waits in its sockets and between."""

    async def main():
        porter = new_porter()
        board = porter.board = Switchboard(porter)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            place = f"127.0.0.1:{listener.getsockname()[1]}"
            _, port = board.open_door("127.0.0.1:0", place)
            ends = []
            for _ in range(2):
                ends.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
                ends[-1].setblocking(False)
                ends[-1].send(GREETING)
                await asyncio.sleep(0.1)
            assert board.weigh() == []
            sent, more = 0, 1
            while more:
                more = fill(ends[0])
                sent += more
                await asyncio.sleep(0.1)
            ((line, held),) = board.weigh()
            assert line == 1
            assert sent / 8 < held < 8 * sent
            between = board.carried()[0].held_up
            assert between
            if not can_splice():  # a buffer is there as a whole
                between = TANK_BYTES
            monkeypatch.setattr(weight, "of", lambda _: 0)
            assert board.weigh() == [(1, between)]
            monkeypatch.setattr(weight, "of", lambda _: 1)
            assert board.weigh() == [(1, 2 + between), (2, 2)]
        await board.aclose()

    run(main())

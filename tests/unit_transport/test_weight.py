"""What a connection holds of the system's memory, and which lines of a relay hold much."""

import asyncio
import contextlib
import socket
import sys

import pytest

from fsl_transport import weight
from fsl_transport.loop import run
from fsl_transport.relay import LITTLE_BYTES, Switchboard

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
@pytest.mark.parametrize("platform", [sys.platform, "darwin", "an older linux"])
def test_what_waits_weighs_at_least_as_much_as_it_is(pair, monkeypatch, platform):
    """On both sides together; where the kernel does not say it, by what is known of the payload."""
    if platform == "an older linux":
        monkeypatch.setattr(weight, "_SO_MEMINFO", 9999)
    else:
        monkeypatch.setattr(sys, "platform", platform)
    near, far = pair
    assert weight.of(near) + weight.of(far) < 16 << 10
    sent = fill(near)
    assert sent > 100_000
    assert weight.payload(near) + weight.payload(far) >= sent
    assert sent <= weight.of(near) + weight.of(far) < 8 * sent
    if platform != sys.platform or platform == "darwin":
        assert weight.of(near) == 2 * weight.payload(near)
    assert weight.of(near) > LITTLE_BYTES
    assert weight.of(far) > LITTLE_BYTES
    left = sent
    while left:
        left -= len(far.recv(1 << 20))
    assert weight.of(far) < 16 << 10
    near.close()
    assert weight.of(near) == 0


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
            assert LITTLE_BYTES < held < 8 * sent
            between = board.carried()[0].held
            assert between
            monkeypatch.setattr(weight, "of", lambda _: LITTLE_BYTES // 2 - 1)
            assert board.weigh() == [(1, LITTLE_BYTES - 2 + between)]
            monkeypatch.setattr(weight, "of", lambda _: LITTLE_BYTES)
            assert board.weigh() == [(1, 2 * LITTLE_BYTES + between), (2, 2 * LITTLE_BYTES)]
        await board.aclose()

    run(main())

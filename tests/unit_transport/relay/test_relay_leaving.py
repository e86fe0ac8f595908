"""How a relay's line ends: what was read is delivered, within a limit, and then nothing of it is left to the kernel, where nobody weighs it."""

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

import pytest
from waiting import until

from fsl_transport.loop import run
from fsl_transport.relay import relay
from fsl_transport.relay.relay import Switchboard

GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
RESETS = struct.pack("ii", 1, 0)
SYSTEM_PORTS = Path("/proc/net/tcp")
on_linux = pytest.mark.skipif(not SYSTEM_PORTS.exists(), reason="says what the kernel still has")


@contextlib.asynccontextmanager
async def line_through(porter):
    """The near and the far end of a line that stands, and the ports of the relay's own two sockets."""
    porter.board = Switchboard(porter)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        place = listener.getsockname()
        _, port = porter.board.open_door("127.0.0.1:0", f"127.0.0.1:{place[1]}")
        near = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        near.setblocking(False)
        near.send(GREETING)
        far, dialled_from = await asyncio.get_running_loop().sock_accept(listener)
        stack.enter_context(far)
        far.setblocking(False)
        await read(far, len(GREETING))
        try:
            yield near, far, {(port, near.getsockname()[1]), (dialled_from[1], place[1])}
        finally:
            await porter.board.aclose()


async def read(connection, most=1 << 30):
    """What comes, until that much or the end of it."""
    loop, got = asyncio.get_running_loop(), 0
    while got < most and (data := await loop.sock_recv(connection, min(1 << 20, most - got))):
        got += len(data)
    return got


async def fill(connection):
    """As much as goes in, while nobody reads at the other end; returns how much."""
    sent, more = 0, 1
    while more:
        more = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                more += connection.send(bytes(1 << 16))
        sent += more
        await asyncio.sleep(0.1)
    return sent


def left(ports):
    """Bytes that the kernel still holds for these connections."""
    total = 0
    for row in map(str.split, SYSTEM_PORTS.read_text("ascii").splitlines()[1:]):
        here, there = (int(place.rpartition(":")[2], 16) for place in row[1:3])
        if (here, there) in ports:
            total += sum(int(part, 16) for part in row[4].split(":"))
    return total


async def said_reset(connection):
    """Whether the other end broke it off, rather than ended it."""
    try:
        await read(connection)
    except ConnectionResetError:
        return True
    return False


@on_linux
def test_what_waits_on_a_line_that_is_dropped_is_gone(new_porter):
    """Both ends hear of it, and the kernel keeps nothing: a line is dropped because of what it holds."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, ports):
            await fill(near)
            assert left(ports) > 100_000
            porter.board.drop(1, "it held too much")
            assert left(ports) == 0
            assert await said_reset(far)
            assert await said_reset(near)
            assert porter.said("ended")[0][1] == "it held too much"

    run(main())


def test_a_slow_reader_gets_what_was_sent_before_the_end(new_porter, monkeypatch):
    """It is a line until then, and weighs."""
    monkeypatch.setattr(relay, "LINGER_S", 0.05)

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            sent = await fill(near)
            near.shutdown(socket.SHUT_WR)
            got = 0
            while porter.board.carried()[0].held_up:  # the end comes behind what waits in between
                got += await read(far, 1 << 18)
                await asyncio.sleep(0.02)
            assert got < sent - 100_000
            await asyncio.sleep(1.0)
            assert len(porter.board.weigh()) == 1
            got += await read(far)
            assert got == sent
            await until(lambda: porter.said("ended"))
            assert porter.board.carried() == []

    run(main())


@on_linux
def test_who_does_not_take_it_in_time_gets_no_more(new_porter, monkeypatch):
    """Otherwise a line that ended would hold its memory for as long as its reader likes."""
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    monkeypatch.setattr(relay, "LEAVE_S", 0.5)

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, ports):
            data = bytes(1 << 16)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            sent = 0
            while not porter.board.carried()[0].held_up:
                with contextlib.suppress(BlockingIOError):
                    sent += near.send(data)
                await asyncio.sleep(0.001)
            porter.board._lines[1].to_server._end(None)  # as if the tank had just become empty
            await asyncio.sleep(0.3)
            assert left(ports) > 10_000
            assert not porter.said("ended")
            await until(lambda: porter.said("ended"))
            assert left(ports) == 0
            assert await said_reset(far)

    run(main())


def test_a_slow_reader_has_as_long_as_it_takes(new_porter, monkeypatch):
    """The limit is for those who take nothing."""
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    monkeypatch.setattr(relay, "LEAVE_S", 0.8)

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            sent = await fill(near)
            near.shutdown(socket.SHUT_WR)
            got = 0
            while porter.board.carried()[0].held_up:
                got += await read(far, 1 << 16)
            begun = asyncio.get_running_loop().time()
            part = (sent - got) // 8
            while got < sent and (more := await read(far, part)):
                got += more
                await asyncio.sleep(0.3)
            assert got == sent
            assert asyncio.get_running_loop().time() - begun > 2

    run(main())


def test_who_takes_a_little_now_and_then_does_not_keep_a_line_for_ever(new_porter, monkeypatch):
    """Progress alone is no reason: a byte would be enough of it, and nothing else asks such a line to go."""
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    monkeypatch.setattr(relay, "LEAVE_S", 0.8)
    monkeypatch.setattr(relay, "LEAVE_MOST_S", 1.5)

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            sent = await fill(near)
            near.shutdown(socket.SHUT_WR)
            got = 0
            while porter.board.carried()[0].held_up:
                got += await read(far, 1 << 16)
            begun = asyncio.get_running_loop().time()
            while not porter.said("ended"):
                got += await read(far, (sent - got) // 20)
                await asyncio.sleep(0.2)
            assert got < sent
            assert 1.0 < asyncio.get_running_loop().time() - begun < 4.0

    run(main())


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_line_that_is_broken_off_ends_soon(new_porter, side):
    """What was on its way to the broken end is never delivered, and Linux goes on saying that it was not: nobody waits for that. Otherwise who comes again finds its places taken."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            here, there = (near, far) if side == "client" else (far, near)
            await fill(there)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            here.close()
            await until(lambda: porter.said("ended"), seconds=relay.LINGER_S + 1)

    run(main())


def test_last_words_arrive_although_nobody_hears_an_answer(new_porter):
    """The server says why, and hangs up; a heartbeat of the client's that comes then breaks its direction, and not the other one."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            said = await fill(far)
            far.close()
            passed = porter.board.carried()[0]
            for _ in range(3):
                near.send(b"beat")
                await asyncio.sleep(0.1)
            assert passed.held_down
            got = await read(near)
            assert got >= passed.down + passed.held_down
            assert got <= said

    run(main())


def test_a_server_is_said_to_answer_when_it_does(new_porter):
    """Its system takes the connection before that, and also where it is stopped."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            await asyncio.sleep(0.1)
            assert porter.said("dialled")
            assert not porter.said("answered")
            far.send(b"greeting")
            assert await read(near, 8) == 8
            far.send(b"more")
            assert await read(near, 4) == 4
            assert porter.said("answered") == [(1,)]

    run(main())


@pytest.mark.parametrize("side", ["client", "server"])
def test_the_reason_is_who_ended_first(new_porter, side):
    """Both directions end, one after the other."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            here, there = (near, far) if side == "client" else (far, near)
            far.send(b"greeting")
            assert await read(near, 8) == 8
            here.close()
            assert await read(there) == 0
            there.close()
            await until(lambda: porter.said("ended"))
            assert porter.said("ended")[0][1] == f"the {side} closed it"

    run(main())


def test_a_line_may_be_dropped_when_it_is_answered(new_porter):
    """The owner may be ending."""

    async def main():
        porter = new_porter()
        porter.answered = lambda line: porter.board.drop(line, "the relay is ending")
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
        async with line_through(porter) as (near, far, _):
            far.send(b"greeting")
            await until(lambda: porter.said("ended"))
            with contextlib.suppress(ConnectionResetError):
                assert await read(near) == 0
        assert failures == []

    run(main())


def test_a_server_that_is_never_heard_of_can_be_left(new_porter):
    """Nobody looks for its answer then."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            await asyncio.sleep(0.1)
            porter.board.drop(1, "no reason")
            assert await said_reset(near) or porter.said("ended")
            with contextlib.suppress(OSError):
                far.send(b"late")
            await asyncio.sleep(0.1)
            assert not porter.said("answered")

    run(main())


@pytest.mark.parametrize("side", ["client", "server"])
def test_what_came_before_a_break_is_delivered(new_porter, side):
    """A refusal is often the last word before one."""

    async def main():
        porter = new_porter()
        async with line_through(porter) as (near, far, _):
            here, there = (near, far) if side == "client" else (far, near)
            sent = await fill(here)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            carried = porter.board.carried()[0]
            passed = carried.up - len(GREETING) if side == "client" else carried.down
            assert 0 < passed <= sent
            here.close()
            assert await read(there) >= passed
            await until(lambda: porter.said("ended"))

    run(main())


def test_a_server_that_ends_before_the_greeting_is_whole(new_porter):
    """What the client still says then goes nowhere."""

    async def main():
        porter = new_porter()
        porter.board = Switchboard(porter)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.setblocking(False)
            place = f"127.0.0.1:{listener.getsockname()[1]}"
            _, port = porter.board.open_door("127.0.0.1:0", place)
            near = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            near.setblocking(False)
            near.send(GREETING[:12])
            far, _ = await asyncio.get_running_loop().sock_accept(listener)
            far.setblocking(False)
            await read(far, 11)
            far.close()
            assert await read(near) == 0
            with contextlib.suppress(OSError):
                near.send(GREETING[12:])
            await until(lambda: porter.said("ended"))
            assert not porter.said("greeted")
        await porter.board.aclose()

    run(main())

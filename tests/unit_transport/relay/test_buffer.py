"""What waits inside a relay: bounded, whole and in order, whether the kernel moves it or we do."""

# ruff: noqa: ASYNC110 - a test polls for its condition

import asyncio
import contextlib
import errno
import os
import random
import select
import socket

import pytest

from fsl_transport.loop import run
from fsl_transport.relay import buffer as tanks
from fsl_transport.relay.buffer import PIPE_BYTES, PIPES, TANK_BYTES, BufferTank, PipeTank, TankPool
from fsl_transport.relay.forwarder import Hose

splices = pytest.mark.skipif(not tanks.can_splice(), reason="this system has no splice")
KINDS = [BufferTank, pytest.param(PipeTank, marks=splices)]


@pytest.fixture
def pair():
    """Two TCP connections: what is written to the first comes out of the source, what the target gets out of the last."""
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


@pytest.fixture
def new_tank():
    """Tanks that are closed at the end."""
    made = []

    def make(kind):
        made.append(kind())
        return made[-1]

    yield make
    for one in made:
        if isinstance(one, PipeTank):
            one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_comes_out(pair, new_tank, kind):
    """Any sizes, a target that takes nothing at times; never more inside than the bound; the end is told as the end."""
    client, source, target, server = pair
    chance = random.Random(1)
    data = chance.randbytes(6_000_000)
    tank, got, sent, most, blocked = new_tank(kind), bytearray(), 0, 0, 0
    while len(got) < len(data):
        with contextlib.suppress(BlockingIOError):
            sent += client.send(data[sent : sent + chance.choice([1, 100, 70_000, 3_000_000])])
        with contextlib.suppress(BlockingIOError):
            if not tank.held:
                assert tank.fill(source) == tank.held > 0
                most = max(most, tank.held)
        try:
            while tank.held:
                tank.drain(target)
        except BlockingIOError:
            blocked += 1
        if blocked % 3 == 2 or sent == len(data):  # now and then it takes something
            blocked += 1
            with contextlib.suppress(BlockingIOError):
                got += server.recv(1 << 20)
    assert blocked > 3
    assert got == data
    assert most <= (TANK_BYTES if kind is BufferTank else PIPE_BYTES)
    client.shutdown(socket.SHUT_WR)
    select.select([source], [], [], 20)
    assert tank.fill(source) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_has_nothing_blocks(pair, new_tank, kind):
    """Nothing must not look like the end, which closes the line."""
    with pytest.raises(BlockingIOError):
        new_tank(kind).fill(pair[1])


@splices
def test_pipes_are_lent_before_buffers_and_there_are_only_so_many(pair):
    """Stuck lines hold theirs: the next ones work with buffers, and descriptors stay for connections."""
    pool = TankPool()
    lent = [pool.take() for _ in range(PIPES + 2)]
    assert [type(tank) for tank in lent] == [PipeTank] * PIPES + [BufferTank] * 2
    pair[0].send(b"waits for ever")
    lent[0].fill(pair[1])
    for tank in lent:
        pool.give(tank)
    assert pool.lent == 0
    again = [pool.take() for _ in range(PIPES)]
    assert [type(tank) for tank in again] == [PipeTank] * PIPES
    assert [tank.held for tank in again] == [0] * PIPES, "what was left in it went with its pipe"
    with pytest.raises(BlockingIOError):
        os.read(again[-1]._out, 1)
    for tank in again:
        pool.give(tank)
    pool.close()
    assert type(pool.take()) is BufferTank


@pytest.mark.parametrize("why", ["no splice", "no descriptor"])
def test_where_there_is_no_pipe_it_copies(monkeypatch, why):
    """A relay on another system, or with no descriptor left, carries on."""

    def fail():
        raise OSError(errno.EMFILE, "too many open files")

    if why == "no splice":
        monkeypatch.setattr(tanks, "can_splice", lambda: False)
    else:
        monkeypatch.setattr(tanks, "PipeTank", type("None", (), {"__init__": lambda _: fail()}))
    assert type(TankPool().take()) is BufferTank


@pytest.mark.parametrize("splices", [pytest.param(True, marks=splices), False])
@pytest.mark.parametrize("ends", [False, True])
def test_urgent_data_is_left_out_and_holds_nothing_up(pair, monkeypatch, splices, ends):
    """A stranger's MSG_OOB stops splice where it is, for ever: what is behind it must come, also before the end, and no loop must spin."""
    client, source, target, server = pair
    if not splices:
        monkeypatch.setattr(tanks, "can_splice", lambda: False)
    fills, over = 0, []
    for kind in (PipeTank, BufferTank):

        def fill(tank, connection, real=kind.fill):
            nonlocal fills
            fills += 1
            return real(tank, connection)

        monkeypatch.setattr(kind, "fill", fill)

    async def until(condition):
        async with asyncio.timeout(20):
            while not condition() and fills < 500:
                await asyncio.sleep(0.001)

    async def main():
        got, pool = bytearray(), TankPool()
        hose = Hose(asyncio.get_running_loop(), pool, source, target, over.append)

        def take():
            with contextlib.suppress(BlockingIOError):
                got.extend(server.recv(1 << 16))

        def has(data):
            take()
            return bytes(got) == data

        try:
            if not ends:
                hose.start()
            for _ in range(1 if ends else 3):
                got.clear()
                client.send(b"12345")
                client.send(b"x", socket.MSG_OOB)
                client.send(b"hello")
                if ends:
                    client.shutdown(socket.SHUT_WR)
                    hose.start()
                await until(lambda: has(b"12345hello"))
                assert bytes(got) == b"12345hello"
            if ends:
                await until(lambda: over)
                assert over == [None]
            else:
                client.send(b"x", socket.MSG_OOB)  # nothing behind it
                await asyncio.sleep(0.05)
            assert fills < 40
            assert hose.carried == (10 if ends else 30)
            assert pool.lent == 0
        finally:
            hose.close()
            pool.close()

    run(main())

"""Low water: woken for a lot while much passes, and for every byte as soon as little does."""

import asyncio
import socket
from collections.abc import Callable

import pytest
from attrs import define
from waiting import until

from fsl_transport.loop import run
from fsl_transport.low_water import LOOK_S, MUCH_BYTES, WATER_BYTES, LowWater


@define
class Timer:
    """Goes off when the test says so."""

    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self):
        """Never, then; for one that has gone off that is nothing."""
        self.is_cancelled = True


class Loop:
    """Timers, oldest first."""

    def __init__(self):
        self._timers = []

    def call_later(self, seconds, call):
        """What asyncio's does."""
        assert seconds == LOOK_S
        self._timers.append(Timer(call))
        return self._timers[-1]

    @property
    def timers(self):
        """Those that would go off."""
        return [timer for timer in self._timers if not timer.is_cancelled]

    def fire(self):
        """Let the oldest go off."""
        timer = self.timers[0]
        self._timers.remove(timer)
        timer.call()


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def mark(connection):
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_little_pieces_are_told_of_one_by_one(pair):
    """A message on a quiet connection waits for nothing, however many there are."""
    loop = Loop()
    water = LowWater(loop, pair[1], lambda: None)
    for _ in range(100):
        water.passed(MUCH_BYTES - 1)
    assert mark(pair[1]) == 1
    assert loop.timers == []


def test_while_much_passes_less_is_looked_for_in_a_moment(pair):
    """And when it stops, so does the looking."""
    loop, looks, sizes = Loop(), [], [WATER_BYTES, 1, WATER_BYTES - 1, 0]

    def look():
        looks.append(mark(pair[1]))
        water.passed(sizes[len(looks) - 1])

    water = LowWater(loop, pair[1], look)
    water.passed(MUCH_BYTES)
    assert mark(pair[1]) == WATER_BYTES
    loop.fire()
    assert mark(pair[1]) == WATER_BYTES, "what passed in between counts"
    water.passed(WATER_BYTES - 1)
    loop.fire()
    assert mark(pair[1]) == WATER_BYTES, "in however many pieces"
    loop.fire()
    assert mark(pair[1]) == 1
    assert loop.timers == []
    assert looks == [WATER_BYTES] * 3
    water.passed(MUCH_BYTES)
    assert mark(pair[1]) == WATER_BYTES, "and again"


def test_who_has_ended_looks_no_more(pair):
    """Its socket's number may be somebody else's by then."""
    loop = Loop()
    water = LowWater(loop, pair[1], lambda: None)
    water.close()
    water.passed(MUCH_BYTES)
    assert len(loop.timers) == 1
    water.close()
    assert loop.timers == []

    def end():
        ending.passed(WATER_BYTES)
        ending.close()

    ending = LowWater(loop, pair[1], end)
    ending.passed(MUCH_BYTES)
    loop.fire()
    assert loop.timers == []
    assert mark(pair[1]) == WATER_BYTES, "a socket that was given up is left alone"


def test_a_socket_that_has_no_such_mark_does_without(pair):
    """It is for speed only."""
    pair[1].close()
    loop = Loop()
    LowWater(loop, pair[1], lambda: None).passed(MUCH_BYTES)
    assert len(loop.timers) == 1


def test_the_kernel_is_quiet_until_there_is_a_lot(pair):
    """What the mark is for, on a real socket and loop."""
    near, far = pair
    far.setblocking(False)

    async def main():
        loop, got = asyncio.get_running_loop(), []

        def read():
            size = len(far.recv(4 * WATER_BYTES))
            got.append(size)
            water.passed(size)

        water = LowWater(loop, far, lambda: None)
        loop.add_reader(far.fileno(), read)
        water.passed(MUCH_BYTES)
        for _ in range(3):
            water._passed = WATER_BYTES  # much goes on passing
            near.sendall(bytes(1000))
            await asyncio.sleep(LOOK_S / 2)
        assert got == []
        near.sendall(bytes(WATER_BYTES))
        await until(lambda: sum(got) == 3000 + WATER_BYTES)
        await until(lambda: mark(far) == 1)
        near.sendall(b"x")
        await until(lambda: got[-1] == 1)
        loop.remove_reader(far.fileno())

    run(main())

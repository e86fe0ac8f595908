"""Low water: woken for a lot while much passes, and for every byte as soon as little does."""

import selectors
import socket
from collections.abc import Callable

import pytest
from attrs import define

from fsl_transport.relay.rcvlowat import (
    LOOK_S,
    MOST_BYTES,
    MUCH_BYTES,
    PAUSE_S,
    SOON_BYTES,
    STALL_S,
    WATER_BYTES,
    LowWater,
)


@define
class Timer:
    """Goes off when the test says so."""

    due: float
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self):
        """Never, then; for one that has gone off that is nothing."""
        self.is_cancelled = True


class Loop:
    """A clock that the test moves, and timers, oldest first."""

    def __init__(self):
        self.now = 100.0
        self._timers = []

    def time(self):
        """What asyncio's does."""
        return self.now

    def call_later(self, seconds, call):
        """What asyncio's does."""
        assert seconds == LOOK_S
        self._timers.append(Timer(self.now + seconds, call))
        return self._timers[-1]

    @property
    def timers(self):
        """Those that would go off."""
        return [timer for timer in self._timers if not timer.is_cancelled]

    def fire(self):
        """Let the oldest go off, when it is due."""
        timer = self.timers[0]
        self.now = timer.due
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


def much(water):
    """A stream that has just been found to be one."""
    water.passed(MUCH_BYTES - 1)
    water.passed(1)


def late(loop, water, size=WATER_BYTES):
    """So much, just before the timer goes off."""
    loop.now = loop.timers[0].due - 0.9 * STALL_S
    water.passed(size)


def test_a_message_is_told_of_as_it_comes(pair):
    """Also one of some megabytes, and also after many others: whoever waits for the answer would wait for the timer."""
    loop = Loop()
    water = LowWater(loop, pair[1], lambda: None)
    for _ in range(20):
        water.passed(MUCH_BYTES - 1)
        loop.now += 1.1 * PAUSE_S
    assert mark(pair[1]) == 1
    assert loop.timers == []


def test_while_much_passes_less_is_looked_for_in_a_moment(pair):
    """And when it stops, so does the looking."""
    loop, looks, sizes = Loop(), [], [1, WATER_BYTES - 1, 0, 0]

    def look():
        looks.append(mark(pair[1]))
        water.passed(sizes[len(looks) - 1])

    water = LowWater(loop, pair[1], look)
    for _ in range(8):
        assert mark(pair[1]) == 1
        water.passed(MUCH_BYTES // 8)
        loop.now += 0.9 * PAUSE_S
    assert mark(pair[1]) == WATER_BYTES
    late(loop, water)
    loop.fire()
    assert looks == [WATER_BYTES], "the mark stays, and what is less is looked for"
    late(loop, water, WATER_BYTES - 1)
    loop.fire()
    assert looks == [WATER_BYTES] * 2, "what passes in a look is of the next while"
    loop.fire()
    assert looks == [WATER_BYTES] * 2 + [1], (
        "a look after the mark is gone, or what came before it is never told of"
    )
    assert loop.timers == []


def streams(water, size):
    """Whether it is one when so much passed."""
    water.passed(size - 1)
    assert water._timer is None
    water.passed(1)
    return water._timer is not None


def test_requests_that_look_like_a_stream_are_soon_taken_for_none(pair):
    """Each waits for an answer, which comes within a millisecond: without a pause, much passes in both. And then a stream comes along."""
    loop = Loop()
    water = LowWater(loop, pair[1], lambda: None)
    size = MUCH_BYTES
    while size < MOST_BYTES:
        assert streams(water, size)
        water.passed(4 * WATER_BYTES)
        loop.fire()
        assert mark(pair[1]) == 1, "a lot passed, and then nothing"
        size *= 2
    for _ in range(2):
        assert streams(water, MOST_BYTES), "no more than that"
        loop.fire()
    assert streams(water, MOST_BYTES)
    for _ in range(SOON_BYTES // WATER_BYTES):
        late(loop, water)
        loop.fire()
    assert mark(pair[1]) == WATER_BYTES
    loop.fire()
    assert mark(pair[1]) == 1
    assert streams(water, MUCH_BYTES), "as at first"


def test_who_has_ended_looks_no_more(pair):
    """Its socket's number may be somebody else's by then."""
    loop = Loop()
    water = LowWater(loop, pair[1], lambda: None)
    water.close()
    much(water)
    assert len(loop.timers) == 1
    water.close()
    assert loop.timers == []

    def end():
        ending.passed(WATER_BYTES)
        ending.close()

    ending = LowWater(loop, pair[1], end)
    much(ending)
    late(loop, ending)
    loop.fire()
    assert loop.timers == []


def test_a_look_that_fails_is_not_the_last(pair):
    """Without a timer, and with its mark, a connection would be deaf to all that is little."""
    loop = Loop()

    def look():
        raise MemoryError

    for passed, timers, left in ((WATER_BYTES, 1, WATER_BYTES), (0, 0, 1)):
        water = LowWater(loop, pair[1], look)
        much(water)
        late(loop, water, passed)
        with pytest.raises(MemoryError):
            loop.fire()
        assert len(loop.timers) == timers
        assert mark(pair[1]) == left
        water.close()


def test_a_socket_that_has_no_such_mark_does_without(pair):
    """It is for speed only."""
    pair[1].close()
    loop = Loop()
    much(LowWater(loop, pair[1], lambda: None))
    assert len(loop.timers) == 1


def test_the_kernel_is_quiet_until_there_is_a_lot(pair):
    """What the mark is for, on a real socket."""
    near, far = pair
    loop = Loop()
    water = LowWater(loop, far, lambda: None)
    much(water)
    with selectors.DefaultSelector() as selector:
        selector.register(far, selectors.EVENT_READ)
        near.sendall(bytes(WATER_BYTES - 1))
        assert selector.select(0.2) == []
        near.sendall(b"x")
        assert selector.select(10.0)
        assert len(far.recv(WATER_BYTES, socket.MSG_WAITALL)) == WATER_BYTES
        near.sendall(b"little")
        assert selector.select(0.2) == []
        loop.fire()
        assert selector.select(10.0)
        assert far.recv(100) == b"little"
        much(water)
        much(water)
        near.sendall(b"last words")
        near.close()
        assert selector.select(10.0), "the end is told of at once"

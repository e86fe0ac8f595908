"""Whoever sits between the nodes may hold back, cut and lose what passes. He must not read, change,
repeat, reorder or mix it.

The hostile relay knows ZMTP's framing, which is in plain sight, and keeps everything that ever
passed. After each trick it is honest again, and everything that was sent must have arrived, once
and in order. Each trick is counted: one that never fired proves nothing.
"""

# ruff: noqa: D102 - small doubles

import random

import pytest
from hostile_relay import DOWN, HANDSHAKE, LARGE, SMALL, UP, HostileRelay, make_frame

from fsl_transport import (
    MessageReceived,
    PeerUp,
    StreamOffered,
    StreamReceived,
    StreamSent,
)


def changed(data, place, bit=1):
    """One bit differs."""
    made = bytearray(data)
    made[place] ^= bit
    return bytes(made)


class Once:
    """Plays a trick once for each way and size of frame, on connections that are past their
    handshake.
    """

    cuts = True

    def __init__(self, play, skip=3):
        self.play = play
        self.skip = skip
        self.open = {(way, size) for way in (UP, DOWN) for size in (SMALL, LARGE)}
        self.fired = []
        self.seen = []

    def __call__(self, connection, way, frame):
        frames = connection.frames[way]
        if len(frames) < HANDSHAKE + self.skip or (way, frame.size) not in self.open:
            return None
        instead = self.play(self, connection, way, frame)
        if instead is not None:
            self.open.discard((way, frame.size))
            self.fired.append((way, frame.size))
        return instead


def other_lane(once, connection, way, frame):
    """The newest frame of the other lane, which has keys of its own."""
    for other in once.relay.connections:
        if (
            other is not connection
            and other.is_bulk != connection.is_bulk
            and len(other.frames[way]) > HANDSHAKE
        ):
            return [other.frames[way][-1].data, frame.data]
    return None


def reflected(once, connection, way, frame):
    """Each side gets its own words back."""
    back = DOWN if way == UP else UP
    connection.send(back, frame.data)
    return [frame.data]


TRICKS = {
    "one bit of the text": lambda once, c, way, frame: [make_frame(frame.flags, changed(frame.body, -1))],
    "one bit of the MAC": lambda once, c, way, frame: [make_frame(frame.flags, changed(frame.body, 17))],
    "one bit of the nonce": lambda once, c, way, frame: [make_frame(frame.flags, changed(frame.body, 15))],
    "a larger nonce": lambda once, c, way, frame: [make_frame(frame.flags, changed(frame.body, 8, 0x40))],
    "the command's name": lambda once, c, way, frame: [make_frame(frame.flags, changed(frame.body, 3))],
    "flag more": lambda once, c, way, frame: [make_frame(frame.flags ^ 1, frame.body)],
    "flag command": lambda once, c, way, frame: [make_frame(frame.flags ^ 4, frame.body)],
    "cut short": lambda once, c, way, frame: [make_frame(frame.flags, frame.body[:-1])],
    "made longer": lambda once, c, way, frame: [make_frame(frame.flags, frame.body + b"\0")],
    "almost empty": lambda once, c, way, frame: [make_frame(frame.flags, frame.body[:9])],
    "lost": lambda once, c, way, frame: [],
    "twice": lambda once, c, way, frame: [frame.data, frame.data],
    "an old one again": lambda once, c, way, frame: [frame.data, c.frames[way][HANDSHAKE].data],
    "an old one in its place": lambda once, c, way, frame: [c.frames[way][-1].data],
    "its own words": reflected,
    "the other lane's": other_lane,
    "rubbish between": lambda once, c, way, frame: [make_frame(0, random.Random(1).randbytes(100)), frame.data],
}  # fmt: skip


class Talker:
    """A node that has much to say in every session: numbered messages, and a stream until it has
    arrived.
    """

    def __init__(self, node, to, data, messages, new_source, new_sink):  # noqa: PLR0917
        self.node, self.to, self.data, self.messages = node, to, data, messages
        self.source, self.new_sink = new_source, new_sink
        self.sinks = []
        self.whole = []
        self.heard = []
        self.was_sent = False
        node.on.update({
            PeerUp: self._up,
            MessageReceived: lambda event: self.heard[-1].append(event.body["number"]),
            StreamOffered: self._offered,
            StreamReceived: lambda _: self.whole.append(self.sinks[-1].content),
            StreamSent: self._sent,
        })  # fmt: skip

    def _up(self, _):
        self.heard.append([])
        for number in range(self.messages):
            self.node.endpoint.send(self.to, {"number": number})
        if not self.was_sent:
            self.node.endpoint.offer(self.to, "stream", {}, self.source(self.data))

    def _offered(self, event):
        self.sinks.append(self.new_sink())
        self.node.endpoint.accept(self.to, event.stream_id, self.sinks[-1])

    def _sent(self, _):
        self.was_sent = True

    @property
    def is_done(self):
        return self.was_sent and self.whole and len(self.heard[-1]) == self.messages


@pytest.fixture
def talk(curve_world, new_source, new_sink, monkeypatch):
    """Let a client and a server say much to each other through a hostile relay; checks that what
    arrives is that, once and in order.
    """
    monkeypatch.setattr("fsl_transport.zmq.link._DIAL_AGAIN_S", 0.1)

    def make(trick, chunks=30, chunk_bytes=8000, messages=60):
        world = curve_world
        world.proxies["c"] = relay = HostileRelay(lambda: world.port, trick)
        world.do(relay.start())
        if isinstance(trick, Once):
            trick.relay = relay
        ps, client = world.listener(), world.dialer(connect=False)
        chance = random.Random(2)
        data = [[chance.randbytes(chunk_bytes) for _ in range(chunks)] for _ in range(2)]
        talkers = [
            Talker(node, to, part, messages, new_source, new_sink)
            for node, to, part in ((client, "", data[0]), (ps, "c", data[1]))
        ]
        client.endpoint.connect(dict)
        world.until(lambda: all(talker.is_done for talker in talkers) and relay.is_through)
        for talker, sent in zip(talkers, reversed(data), strict=True):
            assert talker.whole == [b"".join(sent)]
            for numbers in talker.heard:
                assert numbers == list(range(len(numbers)))
        return relay, ps, client

    return make


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_with_a_frame_gets_through(talk, name):
    """Whatever is changed, repeated, mixed or left out, in either direction, of control or bulk:
    what arrives is what was sent.
    """
    once = Once(TRICKS[name])
    talk(once)
    assert sorted(once.fired) == sorted(
        (way, size) for way in (UP, DOWN) for size in (SMALL, LARGE)
    )


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("way", [UP, DOWN])
def test_no_run_of_lost_frames_mixes_messages(talk, way, count):
    """CURVE notices no gap. A message of several frames must not become one of the first frame of
    it and the second of another.
    """
    lost = []

    def lose(connection, which, frame):
        number = len(connection.frames[which])
        if which != way or not connection.is_bulk or number < HANDSHAKE + 2:
            return None
        # Runs that begin at every place of a message, one after another.
        place = (number - HANDSHAKE - 2) % (count + 11)
        if len(lost) < 6 * count and place < count:
            lost.append(number)
            return []
        return None

    talk(lose)
    assert len(lost) == 6 * count


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_chunk_cannot_get_the_text_of_the_next_one(talk, way):
    """The text of one and the head of the next are left out: two frames that belong to two messages
    are neighbours, each of them genuine.
    """
    lost = []

    def lose(connection, which, frame):
        if which != way or not connection.is_bulk:
            return None
        if (len(lost) == 0 and frame.size == LARGE) or len(lost) == 1:
            lost.append(frame)
            return []
        return None

    talk(lose)
    assert [frame.size for frame in lost] == [LARGE, SMALL]

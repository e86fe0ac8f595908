"""A relay on the path can delay, cut and drop data, but not read, change, repeat, reorder or mix
it.

The hostile relay parses ZMTP's framing, which is not encrypted, and records everything it receives.
After each trick it is honest again, and everything sent must arrive, once and in order. Each trick
is
counted: one that never fired proves nothing.
"""

# ruff: noqa: D102 - small doubles

import random

import pytest
from hostile_relay import DOWN, HANDSHAKE, LARGE, SMALL, UP, HostileRelay, make_frame

from fsl_transport import MessageReceived, PeerUp, StreamOffered, StreamReceived, StreamSent


def changed(data, place, bit=1):
    """Return the data with one byte changed by xor."""
    made = bytearray(data)
    made[place] ^= bit
    return bytes(made)


class Once:
    """Does a trick once for each way and size of frame, on connections past their handshake."""

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
    """Send the newest frame of the other lane, which has its own keys, before the frame."""
    for other in once.relay.connections:
        if (
            other is not connection
            and other.is_bulk != connection.is_bulk
            and len(other.frames[way]) > HANDSHAKE
        ):
            return [other.frames[way][-1].data, frame.data]
    return None


def reflected(once, connection, way, frame):
    """Send each side its own frame back too."""
    back = DOWN if way == UP else UP
    connection.send(back, frame.data)
    return [frame.data]


def altered(frame, *change):
    """Return the frame's bytes with one byte of its body changed by `changed`."""
    return make_frame(frame.flags, changed(frame.body, *change))


def rubbish(once, connection, way, frame):
    """Send a frame of random bytes first."""
    return [make_frame(0, random.Random(1).randbytes(100)), frame.data]


TRICKS = {
    "one bit of the text": lambda once, c, way, frame: [altered(frame, -1)],
    "one bit of the MAC": lambda once, c, way, frame: [altered(frame, 17)],
    "one bit of the nonce": lambda once, c, way, frame: [altered(frame, 15)],
    "a larger nonce": lambda once, c, way, frame: [altered(frame, 8, 0x40)],
    "the command's name": lambda once, c, way, frame: [altered(frame, 3)],
    "flag more": lambda once, c, way, frame: [make_frame(frame.flags ^ 1, frame.body)],
    "flag command": lambda once, c, way, frame: [make_frame(frame.flags ^ 4, frame.body)],
    "cut short": lambda once, c, way, frame: [make_frame(frame.flags, frame.body[:-1])],
    "made longer": lambda once, c, way, frame: [make_frame(frame.flags, frame.body + b"\0")],
    "almost empty": lambda once, c, way, frame: [make_frame(frame.flags, frame.body[:9])],
    "lost": lambda once, c, way, frame: [],
    "twice": lambda once, c, way, frame: [frame.data, frame.data],
    "an old one again": lambda once, c, way, frame: [frame.data, c.frames[way][HANDSHAKE].data],
    "an old one in its place": lambda once, c, way, frame: [c.frames[way][-1].data],
    "its own frames": reflected,
    "the other lane's": other_lane,
    "rubbish between": rubbish,
}


class Talker:
    """A node that sends numbered messages in every session, and one stream until it has arrived."""

    def __init__(self, node, to, data, messages, new_source, new_sink):  # noqa: PLR0917
        self.node, self.to, self.data, self.messages = node, to, data, messages
        self.source, self.new_sink = new_source, new_sink
        self.sinks = []
        self.complete = []
        self.received = []
        self.was_sent = False
        node.on.update({
            PeerUp: self._up,
            MessageReceived: lambda event: self.received[-1].append(event.body["number"]),
            StreamOffered: self._offered,
            StreamReceived: lambda _: self.complete.append(self.sinks[-1].content),
            StreamSent: self._sent,
        })  # fmt: skip

    def _up(self, _):
        self.received.append([])
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
        return self.was_sent and self.complete and len(self.received[-1]) == self.messages


@pytest.fixture
def talk(curve_world, new_source, new_sink, monkeypatch):
    """A function that lets client and server send through a hostile relay, and checks what arrives.

    Everything arrives once and in order.
    """
    monkeypatch.setattr("fsl_transport.zmq.link._DIAL_AGAIN_S", 0.1)

    def make(trick, chunks=30, chunk_bytes=8000, messages=60):
        world = curve_world
        world.proxies["c"] = relay = HostileRelay(lambda: world.port, trick)
        world.do(relay.start())
        if isinstance(trick, Once):
            trick.relay = relay
        ps, client = world.listener(), world.dialer(connect=False)
        rng = random.Random(2)
        data = [[rng.randbytes(chunk_bytes) for _ in range(chunks)] for _ in range(2)]
        talkers = [
            Talker(node, to, part, messages, new_source, new_sink)
            for node, to, part in ((client, "", data[0]), (ps, "c", data[1]))
        ]
        client.endpoint.connect(dict)
        world.until(lambda: all(talker.is_done for talker in talkers) and relay.is_through)
        for talker, sent in zip(talkers, reversed(data), strict=True):
            assert talker.complete == [b"".join(sent)]
            for numbers in talker.received:
                assert numbers == list(range(len(numbers)))
        return relay, ps, client

    return make


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_with_a_frame_gets_through(talk, name):
    """Frames are changed, repeated, mixed or dropped, in either direction, control or bulk: what
    arrives is what was sent.
    """
    once = Once(TRICKS[name])
    talk(once)
    assert sorted(once.fired) == sorted(
        (way, size) for way in (UP, DOWN) for size in (SMALL, LARGE)
    )


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("way", [UP, DOWN])
def test_no_run_of_lost_frames_mixes_messages(talk, way, count):
    """CURVE detects no gap. The first frame of a message must not be joined with the second of
    another.
    """
    lost = []

    def lose(connection, which, frame):
        number = len(connection.frames[which])
        if which != way or not connection.is_bulk or number < HANDSHAKE + 2:
            return None
        # Gaps begin at every place of a message, one after another.
        place = (number - HANDSHAKE - 2) % (count + 11)
        if len(lost) < 6 * count and place < count:
            lost.append(number)
            return []
        return None

    talk(lose)
    assert len(lost) == 6 * count


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_chunk_cannot_get_the_text_of_the_next_one(talk, way):
    """One message's text and the next one's head are dropped: two genuine frames of two messages
    are neighbors.
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

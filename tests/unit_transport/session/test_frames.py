"""The wire format: packed messages parse to the same, and hostile bytes give PeerError only."""

import itertools

import msgpack
import pytest
from hypothesis import strategies as st

from fsl_transport import LocalError, PeerError
from fsl_transport.session import frames
from fsl_transport.session.frames import is_whole, trailer

SESSION = b"s" * 8
GOOD = [
    (
        (frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "c", "client", {"a": [1, {"b": None}]}),
        frames.Hello,
    ),
    ((frames.WELCOME, 1, 5, 2, SESSION, 9, {}), frames.Welcome),
    ((frames.REFUSE, 1, 5, 2, "full", "no room", 0), frames.Refuse),
    ((frames.UNKNOWN, SESSION), frames.Unknown),
    ((frames.BEAT, SESSION, 4, True, {"loss": 2.5}), frames.Beat),
    ((frames.DATA, SESSION, 1, 0, frames.MESSAGE, {"x": 1}), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.OFFER, 1, "delta", 3, 65_536, {}), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.ACCEPT, 1, 0, 0, 0, 99), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.DECLINE, 1, "known"), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.CREDIT, 1, 100, 2), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.DONE, 1), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.STOP, 1, "x"), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.ABORT, 1, "x"), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.BLOCKED, 1, 99, 65_536), frames.Data),
    ((frames.DATA, SESSION, 1, 0, frames.STRIPES, 8), frames.Data),
    ((frames.ACK, SESSION, 3, False), frames.Ack),
    ((frames.PIECE_ACK, SESSION, 7, 3, 9), frames.PieceAck),
    ((frames.PROBE, SESSION, 7, 4), frames.Probe),
    ((frames.BYE, SESSION, "done"), frames.Bye),
]
KINDS = {
    frames.Hello: frames.HELLO,
    frames.Welcome: frames.WELCOME,
    frames.Refuse: frames.REFUSE,
    frames.Unknown: frames.UNKNOWN,
    frames.Beat: frames.BEAT,
    frames.Data: frames.DATA,
    frames.Ack: frames.ACK,
    frames.Bye: frames.BYE,
    frames.PieceAck: frames.PIECE_ACK,
    frames.Probe: frames.PROBE,
}


def parse(*parts, head=1 << 20, chunk=1 << 20):
    return frames.parse(parts, head, chunk)


def raw(*fields):
    return msgpack.packb(fields)


def fields_of(message):
    values = [getattr(message, name) for name in type(message).__slots__ if name[:2] != "__"]
    if isinstance(message, frames.Data):
        values = [*values[:-1], *values[-1]]
    return (KINDS[type(message)], *values)


@pytest.mark.parametrize(("fields", "kind"), GOOD)
def test_every_message_comes_back(fields, kind):
    """For every kind and op."""
    message = parse(frames.pack(fields, 1 << 20))
    assert type(message) is kind
    assert fields_of(message) == fields


def test_a_chunk_keeps_its_payload_uncopied():
    """Bulk bytes must not be copied on the way."""
    payload = memoryview(bytearray(1000))
    head = frames.pack((frames.CHUNK, SESSION, 1, 0, 7, 500, 1500, 3, 9, True), 100)
    message = parse(head, payload)
    assert message == frames.Chunk(SESSION, 1, 0, 7, 500, 1500, 3, 9, True, payload)
    assert message.payload is payload


def test_a_hello_of_another_version_is_foreign():
    """A mismatch must be explainable whatever that version's HELLO looks like."""
    assert parse(raw(frames.HELLO, 99, 5, 2)) == frames.Foreign(99, 5, 2)
    assert parse(raw(frames.HELLO, 99, 5, 2, [1], {"new": 1}, 3.5)) == frames.Foreign(99, 5, 2)
    with pytest.raises(PeerError):
        parse(raw(frames.HELLO, "9", 5, 2))


BAD = {
    "no frame": (),
    "three frames": (raw(frames.UNKNOWN, SESSION), b"", b""),
    "payload where none belongs": (raw(frames.UNKNOWN, SESSION), b""),
    "data with a payload": (raw(frames.DATA, SESSION, 1, 0, frames.DONE, 1), b""),
    "chunk without payload": (raw(frames.CHUNK, SESSION, 1, 0, 0, 0, 1, 0, 1, True),),
    "piece beyond its chunk": (raw(frames.CHUNK, SESSION, 1, 0, 0, 1, 2, 0, 1, True), b"ab"),
    "empty piece": (raw(frames.CHUNK, SESSION, 1, 0, 0, 0, 2, 0, 1, True), b""),
    "piece that asks by a number": (raw(frames.CHUNK, SESSION, 1, 0, 0, 0, 2, 0, 1, 1), b"ab"),
    "probe with a payload": (raw(frames.PROBE, SESSION, 1, 1), b"x"),
    "acknowledgement without a last": (raw(frames.PIECE_ACK, SESSION, 1, 1),),
    "empty head": (b"",),
    "no array": (raw()[:0] + msgpack.packb({"a": 1}),),
    "empty array": (raw(),),
    "kind is text": (raw("HELLO"),),
    "kind is bool": (raw(True, SESSION),),
    "unknown kind": (raw(77, SESSION),),
    "trailing bytes": (raw(frames.UNKNOWN, SESSION) + b"\x00",),
    "truncated": (raw(frames.UNKNOWN, SESSION)[:-1],),
    "short session": (raw(frames.UNKNOWN, b"123"),),
    "session is text": (raw(frames.UNKNOWN, "12345678"),),
    "surplus field": (raw(frames.UNKNOWN, SESSION, 1),),
    "missing field": (raw(frames.BEAT, SESSION, 1, True),),
    "negative number": (raw(frames.ACK, SESSION, -1, False),),
    "huge number": (raw(frames.ACK, SESSION, 1 << 63, False),),
    "bool for a number": (raw(frames.ACK, SESSION, True, False),),
    "number for a bool": (raw(frames.ACK, SESSION, 1, 1),),
    "bad name": (raw(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "../c", "client", {}),),
    "empty name": (raw(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "", "client", {}),),
    "long role": (raw(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "c", "r" * 2000, {}),),
    "short hello": (raw(frames.HELLO, frames.PROTOCOL_VERSION, 5),),
    "body is a list": (raw(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "c", "client", []),),
    "int key": (raw(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "c", "client", {1: 2}),),
    "bytes key inside": (
        raw(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "c", "client", {"a": [{b"k": 2}]}),
    ),
    "welcome with a short session": (raw(frames.WELCOME, 1, 5, 2, b"s", 9, {}),),
    "refuse with a long code": (raw(frames.REFUSE, 1, 5, 2, "c" * 2000, "t", 0),),
    "refuse with a long text": (raw(frames.REFUSE, 1, 5, 2, "c", "t" * 2000, 0),),
    "long reason": (raw(frames.BYE, SESSION, "r" * 2000),),
    "short data": (raw(frames.DATA, SESSION, 1, 0),),
    "data with text seq": (raw(frames.DATA, SESSION, "1", 0, frames.DONE, 1),),
    "data with negative seq": (raw(frames.DATA, SESSION, -1, 0, frames.DONE, 1),),
    "data with bad session": (raw(frames.DATA, b"", 1, 0, frames.DONE, 1),),
    "unknown op": (raw(frames.DATA, SESSION, 1, 0, 99, 1),),
    "op with wrong fields": (raw(frames.DATA, SESSION, 1, 0, frames.DONE, "1"),),
    "op with a negative number": (raw(frames.DATA, SESSION, 1, 0, frames.DONE, -1),),
    "op with a bad key": (raw(frames.DATA, SESSION, 1, 0, frames.MESSAGE, {b"k": 1}),),
    "op with a long reason": (raw(frames.DATA, SESSION, 1, 0, frames.STOP, 1, "r" * 2000),),
    "empty stream id": (raw(frames.DATA, SESSION, 1, 0, frames.OFFER, 1, "", 1, 0, {}),),
    "long stream id": (raw(frames.DATA, SESSION, 1, 0, frames.OFFER, 1, "s" * 2000, 1, 0, {}),),
    "extension type": (msgpack.packb([frames.UNKNOWN, msgpack.ExtType(5, b"abc")]),),
    "empty extension type": (b"\x92\x04\xc7\x00\x05",),
    "timestamp": (msgpack.packb([frames.UNKNOWN, msgpack.Timestamp(1, 1)]),),
    "timestamp in a body": (
        msgpack.packb([frames.BEAT, SESSION, 1, True, {"at": msgpack.Timestamp(1, 1)}]),
    ),
    "a cheap list of many": (raw(frames.BEAT, SESSION, 1, True, {"a": [None] * 200_000}),),
    "text that is no utf-8": (b"\x93\x08\xc4\x08ssssssss\xa2\xff\xfe",),
    "array that claims too much": (b"\xdd\xff\xff\xff\xff",),
    "map that claims too much": (b"\xdf\xff\xff\xff\xff",),
    "binary that claims too much": (b"\xc6\xff\xff\xff\xff",),
    "deep nesting": (b"\x91" * 100_000,),
    "deep nesting in a body": (b"\x95\x05\xc4\x08ssssssss\x01\xc3\x81\xa1a" + b"\x91" * 2000,),
    "never used byte": (b"\xc1",),
}


@pytest.mark.parametrize("parts", BAD.values(), ids=BAD.keys())
def test_bad_bytes_are_peer_errors(parts):
    """Each way to break the format is the peer's error, never another exception."""
    with pytest.raises(PeerError):
        parse(*parts)


CHUNK = (frames.CHUNK, SESSION, 1, 0, 7, 0, 5, 0, 1, True)
NATURALS = [
    (fields, position)
    for fields in (*(fields for fields, _ in GOOD), CHUNK)
    for position, value in enumerate(fields)
    if position and type(value) is int and (fields[0], position) != (frames.HELLO, 1)
]
"""Each integer of each message, but for its kind and for HELLO's version, which may be any."""


@pytest.mark.parametrize(("fields", "position"), NATURALS)
def test_counts_are_natural_numbers(fields, position):
    """A negative one would make a negative window."""
    payload = (b"12345",) if fields[0] == frames.CHUNK else ()
    for bad in (-1, 1 << 63, True, "1", None):
        wrong = (*fields[:position], bad, *fields[position + 1 :])
        with pytest.raises(PeerError):
            parse(raw(*wrong), *payload)


def test_limits_come_before_everything():
    """Sizes are checked before anything is allocated for the content."""
    head = frames.pack((frames.BYE, SESSION, "x" * 100), 1000)
    with pytest.raises(PeerError, match="over the limit"):
        parse(head, head=len(head) - 1)
    chunk = frames.pack((frames.CHUNK, SESSION, 1, 0, 7, 0, 5, 0, 1, True), 100)
    with pytest.raises(PeerError, match="over the limit"):
        parse(chunk, b"12345", chunk=4)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 64)
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("body", [[], {1: 2}, {"a": {b"b": 1}}, {"a": [({3: 4},)]}, None], ids=repr)
def test_bodies_a_peer_would_refuse_are_refused_here(body):
    """Our own mistake must be a LocalError here, not a lost session there."""
    with pytest.raises(LocalError):
        frames.check_body(body)


def sent(number):
    """The frames of one message as they are sent."""
    head = msgpack.packb([9, b"session!", 1, 0, number])
    return [head, b"payload %d" % number, trailer(head)]


def test_what_was_sent_is_whole():
    """With a payload and without, for all kinds of buffers."""
    head, payload, end = sent(1)
    assert is_whole([head])
    assert is_whole([head, payload, end])
    assert is_whole([head, memoryview(payload), end])
    assert is_whole([head, b"", end])
    assert trailer(memoryview(head)) == end


def test_no_choice_of_frames_in_order_makes_another_message():
    """A relay can only drop frames: every way to do that, of four messages. Which frame ends a
    message is encrypted.
    """
    genuine = [sent(number) for number in range(4)]
    frames = [frame for message in genuine for frame in message]
    ends = {message[2] for message in genuine}
    whole = [
        list(choice)
        for count in range(1, 7)
        for choice in itertools.combinations(frames, count)
        if choice[-1] in ends and not ends & set(choice[:-1]) and is_whole(choice)
    ]
    assert whole == genuine


@pytest.mark.parametrize(
    "parts", [[], [b"", b""], [b"a", b"b"], [b"a", b"b", b"a"], [b"a"] * 4, [trailer(b"a")]]
)
def test_what_is_not_whole(parts):
    """Unauthenticated peers may send anything."""
    assert not is_whole(parts)

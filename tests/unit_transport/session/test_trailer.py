"""Trailers: the frames of a message belong together, whatever was dropped on the way."""

import itertools

import msgpack
import pytest

from fsl_transport.session.frames import is_whole, trailer


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

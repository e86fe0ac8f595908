"""The stripes' machines: windows, lost and stalled connections, pieces, counts; no network."""

import pytest

from fsl_transport import PeerError
from fsl_transport.bulk.reassembly import EagerPieces, Reassembly
from fsl_transport.bulk.stripes import BulkSender
from fsl_transport.session.frames import Chunk


def sender(count=1, *, piece=1 << 20, window=1 << 26, min_probe_timeout_s=0.5):
    made = BulkSender(
        min_probe_timeout_s=min_probe_timeout_s, piece_limit=piece, window_limit=window
    )
    made.count = count
    for stripe in range(count):
        made.opened(stripe, 0.0)
    return made


def send_all(bulk, now=0.0):
    sent = []
    while (found := bulk.next(now)) is not None:
        sent.append(found)
    return sent


def piece_of(payload, *, offset=0, size=None, round_=0, stream=1, index=0):
    size = len(payload) if size is None else size
    return Chunk(b"12345678", stream, round_, index, offset, size, 0, 1, True, payload)


def test_a_lone_stripe_is_probed_before_anything_is_resent():
    """TCP may only be repairing a loss, and the pieces in flight may still arrive."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(20_000))
    assert len(send_all(bulk)) == 1
    when = bulk.next_deadline()
    assert bulk.handle_timer(when - 0.01) == []
    assert bulk.handle_timer(when) == [(0, 2)]
    assert bulk.next(when) is None
    assert bulk.next_deadline() > when + 1.0  # the timeout doubles
    bulk.on_ack(0, 2, 2, when + 1)  # the probe arrived, the piece did not
    ((stripe, seq, asks, piece),) = send_all(bulk, when + 1)
    assert (stripe, seq, asks, len(piece.data)) == (0, 3, True, 20_000)
    assert bulk.resent_bytes == 20_000


def test_pieces_of_a_forgotten_stream_are_not_resent():
    """A stopped stream must cost the path nothing more."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(10_000))
    bulk.add(2, 0, 0, bytes(10_000))
    send_all(bulk)
    bulk.add(1, 0, 1, bytes(10_000))
    bulk.forget(1)
    assert send_all(bulk) == []
    bulk.handle_timer(bulk.next_deadline())
    bulk.on_ack(0, 3, 3, 2.0)
    assert [piece.stream for *_, piece in send_all(bulk, 2.0)] == [2]


def test_acknowledging_what_was_not_sent_is_an_error():
    """The peer broke the protocol."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(10))
    send_all(bulk)
    for stripe, first, last in ((0, 1, 2), (0, 0, 1), (0, 2, 1), (5, 1, 1)):
        with pytest.raises(PeerError, match="not sent"):
            bulk.on_ack(stripe, first, last, 1.0)
    bulk.on_ack(0, 1, 1, 1.0)
    bulk.on_ack(0, 1, 1, 1.0)  # repeated


def test_a_connection_is_used_once_it_has_answered():
    """It may never come up, so nothing is sent on it before."""
    bulk = sender()
    bulk.count = 2
    assert bulk.probe(1, 0.0) == 1
    bulk.add(1, 0, 0, bytes(1 << 20))
    assert {stripe for stripe, *_ in send_all(bulk)} == {0}
    when = bulk.next_deadline()
    assert (1, 2) in bulk.handle_timer(when)  # the probe may be lost
    bulk.on_ack(1, 2, 2, when + 0.1)
    assert {stripe for stripe, *_ in send_all(bulk, when + 0.1)} == {1}
    bulk.count = 1
    bulk.on_ack(0, 1, 1, when + 0.2)
    assert {stripe for stripe, *_ in send_all(bulk, when + 0.2)} <= {0}


def test_pieces_that_overlap_are_an_error():
    """More bytes than the chunk has do not count as a complete chunk."""
    reassembly = Reassembly(100, 0)
    assert reassembly.add(piece_of(bytes(60), size=100)) is None
    assert reassembly.add(piece_of(bytes(60), size=100)) is None  # the same again
    with pytest.raises(PeerError, match="overlap"):
        reassembly.add(piece_of(bytes(60), offset=40, size=100))


def test_eager_pieces_are_bounded():
    """They were not requested."""
    eager = EagerPieces()
    kept = [eager.keep(piece_of(bytes(60), stream=n), 400 - eager.bytes, 3) for n in (1, 2, 3, 4)]
    assert kept == [316, 0, 0, 0]
    assert [(len(found), missed) for found, missed in map(eager.take, (1, 2, 3, 4))] == [
        (1, False),
        (0, True),
        (0, True),
        (0, True),
    ]
    assert eager.bytes == 0
    assert [eager.keep(piece_of(b"x", stream=n), 1000, 2) for n in (1, 2, 3)] == [257, 257, 0]
    with pytest.raises(PeerError):
        eager.keep(piece_of(b"x", round_=1), 100, 2)

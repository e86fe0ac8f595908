"""The stream machines and byte credit, without any network."""

import math

import pytest

from fsl_transport import PeerError
from fsl_transport.bulk.chunks import READS_LIMIT, RESUMES_LIMIT, ReceiveStream, SendStream

UNWRITTEN = 500
"""Limit of a sender's unwritten bytes: above every window here but those of the receiver alone."""


def accepted(chunks=10, window=1000, limit=100, chunk=0):
    stream = ReceiveStream(1, chunks, stall_s=10.0)
    stream.accept(chunk, window, limit, now=0.0)
    return stream


def sending(chunks=10, limit=1000, chunk=0):
    stream = SendStream(1, chunks, UNWRITTEN)
    stream.accept(0, chunk, 0, limit)
    return stream


def test_a_resume_goes_back_and_drops_the_pending_read():
    """Data from before a resume must not be taken for the chunk requested now."""
    stream = sending()
    for _ in range(3):
        _, serial = stream.next_read()
        stream.delivered(serial, b"x" * 10)
        stream.take()
    _, old = stream.next_read()
    stream.accept(1, 1, 10, 1000)
    assert not stream.is_current(old)
    index, serial = stream.next_read()
    assert (index, stream.credit.sent) == (1, 10)
    stream.delivered(old, b"wrong")
    assert stream.take() is None
    stream.delivered(serial, b"right")
    assert stream.take() == (1, b"right")


def send_one(stream, size=10):
    _, serial = stream.next_read()
    assert stream.answered(serial)
    stream.delivered(serial, b"x" * size)
    return stream.take()


def test_a_receivers_credit_is_not_trusted():
    """A limit of 2**62 from a peer that never reads must not fill the sender's memory."""
    stream = sending(limit=1 << 62)
    for _ in range(5):
        assert send_one(stream, 100)
    assert stream.next_read() is None
    stream.grant(1 << 62, 1)
    assert send_one(stream, 150) is None  # held: 400 and 150 are more than 500
    stream.grant(1 << 62, 2)
    assert stream.take() is not None
    stream.accept(1, 5, 500, 1 << 62)
    assert send_one(stream, 100)
    # A resume counts by the chunk's position, not by the claimed one.
    assert stream.next_read()[0] == 6


def test_a_receiver_cannot_confirm_what_was_not_sent():
    """That would circumvent the limit above. Nor may it request a chunk that it confirmed."""
    for operation in (
        lambda stream: stream.grant(100, 3),
        lambda stream: stream.accept(1, 3, 30, 100),
        lambda stream: stream.accept(1, 0, 0, 100),
    ):
        stream = sending()
        send_one(stream)
        send_one(stream)
        stream.grant(1000, 1)
        with pytest.raises(PeerError):
            operation(stream)


def test_a_credit_beyond_a_resume_skips_what_arrived_late():
    """Chunks from before a resume were written meanwhile: they are not sent again."""
    stream = sending(limit=100)
    for _ in range(5):
        send_one(stream)
    stream.accept(1, 1, 10, 100)
    assert stream.next_read()[0] == 1
    stream.grant(140, 4)
    assert (stream.next_chunk, stream.credit.sent) == (4, 40)
    assert send_one(stream) == (4, b"x" * 10)


def test_open_reads_are_bounded_however_often_it_is_resumed():
    """Every resume starts a read at another index; a slow disk must not get them all."""
    stream = sending()
    send_one(stream)
    send_one(stream)
    serials = []
    for round_ in range(1, 40):
        stream.accept(round_, round_ % 3, 0, 1000)
        wanted = stream.next_read()
        if wanted:
            serials.append(wanted[1])
    assert len(serials) == READS_LIMIT
    assert stream.answered(serials[0])
    assert not stream.answered(serials[0])
    assert stream.next_read() is not None


def test_resumes_without_progress_have_an_end():
    """A peer that requests the same chunk without end does not accept it."""
    stream = sending()
    for round_ in range(1, 3 * RESUMES_LIMIT):
        stream.accept(round_, 0, 0, 1000)  # nothing was sent since: it costs nothing
    stream = sending()
    for round_ in range(1, RESUMES_LIMIT + 1):
        send_one(stream)
        stream.accept(round_, 0, 0, 1000)
    send_one(stream)
    stream.accept(stream.round + 1, 1, 10, 1000)  # one chunk further: the count restarts
    send_one(stream)
    stream.accept(stream.round + 1, 1, 10, 1000)
    for _ in range(RESUMES_LIMIT - 1):
        send_one(stream)
        stream.accept(stream.round + 1, 1, 10, 1000)
    send_one(stream)
    with pytest.raises(PeerError, match="resumes"):
        stream.accept(stream.round + 1, 1, 10, 1000)


def test_sender_refuses_invalid_operations():
    """ACCEPT twice or beyond the end, CREDIT before ACCEPT."""
    stream = SendStream(1, 3, UNWRITTEN)
    with pytest.raises(PeerError):
        stream.grant(10, 0)
    with pytest.raises(PeerError):
        stream.accept(1, 0, 0, 10)
    with pytest.raises(PeerError):
        stream.accept(0, 4, 0, 10)
    stream.accept(0, 3, 0, 10)
    with pytest.raises(PeerError):
        stream.accept(0, 0, 0, 10)
    with pytest.raises(PeerError):
        stream.grant(10, 4)


def take(stream, round_, index, size, now):
    """Deliver a complete chunk in one piece; returns the chunks to write, or None if it is
    dropped.
    """
    return stream.on_complete(index) if stream.on_piece(round_, index, size, now) else None


def test_receiver_refuses_invalid_pieces():
    """Chunks beyond the end, of a future round, or before ACCEPT."""
    stream = accepted(chunks=3)
    with pytest.raises(PeerError):
        stream.on_piece(0, 3, 10, 1.0)
    with pytest.raises(PeerError):
        stream.on_piece(1, 0, 10, 1.0)
    with pytest.raises(PeerError):
        ReceiveStream(1, 3, 10.0).on_piece(0, 0, 10, 1.0)


def test_bytes_beyond_the_credit_are_dropped():
    """A sender that ignores credit must not fill the receiver's memory."""
    stream = accepted(window=100)
    assert take(stream, 0, 0, 60, 1.0) == [0]
    assert take(stream, 0, 1, 60, 1.0) is None
    assert stream.credit.pending == 60


def test_complete_means_written():
    """DONE promises that every chunk is written, not only that it arrived."""
    stream = accepted(chunks=2)
    take(stream, 0, 0, 10, 1.0)
    take(stream, 0, 1, 10, 1.0)
    stream.on_written(10, 1000, 1.0)
    assert not stream.is_complete
    stream.on_written(10, 1000, 1.0)
    assert stream.is_complete
    assert accepted(chunks=5, chunk=5).is_complete
    assert not ReceiveStream(1, 0, 10.0).is_complete


def test_the_stall_timeout():
    """It runs only while the sender is the bottleneck, and doubles."""
    offered = ReceiveStream(1, 3, 10.0)
    assert offered.next_deadline() == math.inf
    stream = accepted(chunks=3)
    assert stream.next_deadline() == 10.0
    assert not stream.handle_timer(9.0)
    assert stream.handle_timer(10.0)
    assert stream.next_deadline() == 30.0
    assert stream.handle_timer(30.0)
    assert stream.next_deadline() == 70.0
    assert take(stream, 2, 0, 10, 50.0) == [0]
    assert stream.next_deadline() == math.inf  # the writer is busy
    stream.on_written(10, 1000, 60.0)
    # 50 s was a wait that ended well: from now on patience is twice that.
    assert stream.next_deadline() == 160.0
    take(stream, 2, 1, 10, 61.0)
    take(stream, 2, 2, 10, 61.0)
    stream.on_written(10, 1000, 62.0)
    stream.on_written(10, 1000, 62.0)
    assert stream.next_deadline() == math.inf


def began_eager(*sizes):
    """Return a sender that sent chunks of these sizes before ACCEPT, and its next read."""
    eager = SendStream(1, 9, 1000)
    eager.begin_eager(20)
    for size in sizes:
        _, serial = eager.next_read()
        eager.delivered(serial, bytes(size))
        assert eager.take() is not None
    reading = eager.next_read()  # one ahead, as always
    assert not eager.is_accepted
    return eager, reading


def test_an_eager_sender_is_like_any_other_once_it_is_accepted():
    """Credit counts by position: eager chunks that the receiver does not need must not count."""

    def story(machine, first, reading=None):
        machine.accept(0, first, 0, 100)
        for _ in range(2):
            index, serial = reading or machine.next_read()
            reading = None
            machine.delivered(serial, bytes(7))
            assert machine.take() == (index, bytes(7))
        machine.grant(120, first + 1)
        return (
            machine.next_chunk,
            machine.confirmed,
            machine.credit.left,
            machine._offset,
            machine._written_bytes,
            list(machine._ends),
        )

    for first in (2, 3):
        eager, reading = began_eager(8, 9)
        expected = story(eager, first, reading if first == 2 else None)
        assert expected == story(SendStream(1, 9, 1000), first)
        assert eager.is_accepted


@pytest.mark.parametrize(("first", "sent"), [(0, 17), (1, 9), (2, 0)])
def test_eager_chunks_are_not_sent_again(first, sent):
    """In the same round they might be cut differently, and overlapping pieces are an error."""
    eager, (index, serial) = began_eager(8, 9)
    eager.accept(0, first, 0, 100)
    assert eager.next_read() is None, "it reads already"
    eager.delivered(serial, bytes(5))
    assert eager.take() == (index, bytes(5)) == (2, bytes(5))
    assert eager.credit.left == 100 - sent - 5
    eager.grant(100, 3)
    assert eager._written_bytes == eager._offset == sent + 5
    eager.accept(1, 3, sent + 5, 200)
    assert eager.credit.left == 200 - sent - 5


def test_an_eager_stream_needs_accept_first():
    """CREDIT and resumes are for accepted streams."""
    eager = SendStream(1, 9, 1000)
    eager.begin_eager(20)
    with pytest.raises(PeerError):
        eager.grant(50, 0)
    with pytest.raises(PeerError):
        eager.accept(1, 0, 0, 50)
    with pytest.raises(PeerError):
        eager.accept(0, 10, 0, 50)


def test_a_window_follows_the_path_and_grows_beyond_it_with_losses():
    """First the measured need; doubled if that was granted and is not enough."""
    stream = accepted(window=100, limit=50)
    assert stream.on_blocked(100, 150, 1000)
    assert stream.credit.limit == 150
    assert not stream.on_blocked(100, 300, 1000)  # sent before the 150 arrived
    assert stream.on_blocked(150, 150, 1000)
    assert stream.credit.limit == 300
    for limit in (300, 600, 1000):
        stream.on_blocked(limit, 150, 1000)
    assert stream.credit.limit == 1000


def test_committed_bytes_are_what_may_arrive():
    """Chunks that arrived and are not written, and the rest of the credit or of the stream."""
    stream = accepted(chunks=3, window=100, limit=30)
    assert stream.committed_bytes == 90
    stream.on_piece(0, 0, 30, 1.0)
    assert stream.committed_bytes == 90
    stream.on_complete(0)
    assert stream.committed_bytes == 30 + 60
    stream.on_written(30, 100, 1.0)
    assert stream.committed_bytes == 60
    for index in (1, 2):
        stream.on_piece(0, index, 20, 1.0)
    stream.on_complete(1)
    stream.on_complete(2)
    assert stream.committed_bytes == 40
    stream.on_written(20, 100, 1.0)
    stream.on_written(20, 100, 1.0)
    assert stream.committed_bytes == 0
    assert accepted(chunks=9, window=100, limit=30).committed_bytes == 100
    assert ReceiveStream(1, 3, 10.0).committed_bytes == 0

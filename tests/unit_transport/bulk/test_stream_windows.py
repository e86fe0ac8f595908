"""How wide a receiver's window is: what its line needs, what its writer keeps up with, what it may be."""

import pytest

from fsl_transport.bulk.chunks import ReceiveStream
from fsl_transport.bulk.credit import Granting


def accepted(chunks=10, window=1000, limit=100, chunk=0):
    stream = ReceiveStream(1, chunks, stall_s=10.0)
    stream.accept(chunk, window, limit, now=0.0)
    return stream


def take(stream, index, size):
    """A chunk comes, whole."""
    assert stream.begin(0, index, size, 1.0)
    stream.arrived(index)


def write(stream, index, size):
    """A chunk comes and is written."""
    take(stream, index, size)
    stream.wrote(size, 100, 1.0)


def test_a_window_is_what_the_line_needs_and_grows_beyond_it_where_something_is_lost():
    """First what was measured; doubled where that is given and not enough."""
    stream = accepted(window=100, limit=50)
    assert stream.blocked(100, 150, 1000)
    assert stream.credit.limit == 150
    assert not stream.blocked(100, 300, 1000)  # said before it heard of the 150
    assert stream.blocked(150, 150, 1000)
    assert stream.credit.limit == 300
    for limit in (300, 600, 1000):
        stream.blocked(limit, 150, 1000)
    assert stream.credit.limit == 1000


def test_a_window_that_is_wider_than_it_may_be_is_not_raised():
    """The room got others since it was given."""
    stream = accepted(window=100, limit=10)
    write(stream, 0, 40)
    assert stream.credit.limit == 140
    assert not stream.blocked(140, 50, 50)
    assert stream.credit.limit == 140
    write(stream, 1, 40)
    assert stream.credit.limit == 140, "80 are written: up to 130 it may be"
    write(stream, 2, 40)
    assert stream.credit.limit == 170


def test_no_more_is_promised_than_may_come():
    """What came and is not written, and what is left of the credit or of the stream."""
    stream = accepted(chunks=3, window=100, limit=30)
    assert stream.promised_bytes == 90
    stream.begin(0, 0, 30, 1.0)
    assert stream.promised_bytes == 90
    stream.arrived(0)
    assert stream.promised_bytes == 30 + 60
    stream.wrote(30, 100, 1.0)
    assert stream.promised_bytes == 60
    for index in (1, 2):
        stream.begin(0, index, 20, 1.0)
    stream.arrived(1)
    stream.arrived(2)
    assert stream.promised_bytes == 40
    stream.wrote(20, 100, 1.0)
    stream.wrote(20, 100, 1.0)
    assert stream.promised_bytes == 0
    assert accepted(chunks=9, window=100, limit=30).promised_bytes == 100
    assert ReceiveStream(1, 3, 10.0).promised_bytes == 0


def test_a_window_does_not_grow_with_a_slow_writer():
    """Credit that comes back late is no reason for more of it."""
    stream = accepted(window=100, limit=50)
    take(stream, 0, 50)
    take(stream, 1, 50)
    assert not stream.blocked(100, 400, 1000)  # the writer holds all of it
    assert stream.wrote(50, 1000, 1.0)
    assert stream.wrote(50, 1000, 1.0)
    assert stream.credit.limit == 200
    assert stream.blocked(200, 400, 1000)
    assert stream.credit.limit == 500
    take(stream, 2, 50)
    stream.wrote(50, 60, 1.0)  # others came and share the budget
    assert stream.credit.limit == 500
    assert not stream.blocked(500, 60, 60)


@pytest.mark.parametrize(("unwritten", "grows"), [(100, True), (101, False)])
def test_a_writer_is_behind_when_it_has_more_than_a_quarter_of_the_window(unwritten, grows):
    """Less than that is what it is just about to write."""
    stream = accepted(window=400, limit=50)
    take(stream, 0, unwritten)
    assert stream.blocked(400, 400, 2000) == grows


def test_what_is_written_is_told_in_time_for_a_sender_with_smaller_chunks():
    """It stops at its own largest window, of 8 MiB at the least, and a chunk of its own; ours may be larger, and the limit stays where it is."""
    mib = 1 << 20
    credit = Granting(64 * mib, 16 * mib)
    credit.receive(10 * mib)
    told = [credit.consume(mib, 20 * mib) for _ in range(10)]
    assert told == [False] * 7 + [True] + [False] * 2
    assert credit.limit == 64 * mib


def test_a_window_that_the_line_does_not_need_is_taken_back_while_the_writer_is_behind():
    """What it holds up waits in memory. The limit that was told stays, and rises again by the narrower window."""
    stream = accepted(window=400, limit=50, chunks=20)
    for index in range(8):
        take(stream, index, 50)
    assert not stream.blocked(400, 100, 1000)
    for _ in range(6):
        stream.wrote(50, 1000, 1.0)
    assert stream.credit.limit == 400
    stream.wrote(50, 1000, 1.0)
    stream.wrote(50, 1000, 1.0)
    assert stream.credit.limit == 500

"""The receiver's window: the path's need, the writer's pace, the limits."""

from fsl_transport.bulk.chunks import ReceiveStream


def accepted(chunks=10, window=1000, limit=100, chunk=0):
    stream = ReceiveStream(1, chunks, stall_s=10.0)
    stream.accept(chunk, window, limit, now=0.0)
    return stream


def take(stream, index, size):
    """Deliver a complete chunk."""
    assert stream.on_piece(0, index, size, 1.0)
    stream.on_complete(index)


def write(stream, index, size):
    """Deliver a chunk and write it."""
    take(stream, index, size)
    stream.on_written(size, 100, 1.0)


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

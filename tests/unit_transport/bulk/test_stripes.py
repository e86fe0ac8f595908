"""The stripes' machines: windows, lost and stalled connections, pieces, counts; no network."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_transport import PeerError
from fsl_transport.bulk.congestion_window import BUSY_LOOP_BYTES, BUSY_LOOP_S
from fsl_transport.bulk.reassembly import AckRanges, EagerPieces, Reassembly
from fsl_transport.bulk.stripes import (
    INITIAL_FLIGHT_BYTES,
    MIN_PIECE_BYTES,
    PIECES_PER_WINDOW,
    WINDOW_GAIN,
    BulkSender,
)
from fsl_transport.session.frames import Chunk

KIB = 1024


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


class Path:
    """``rate`` bytes per second for each stripe, a delay each way, free acknowledgements.

    No packets and no TCP (``simulated_path`` in tests/support has them): ten seconds of 25 MB/s
    take 0.05 s here, and 20 s there.
    """

    def __init__(self, bulk, *, rate, delay_s):
        self.bulk, self.rate, self.delay_s = bulk, rate, delay_s
        self.lanes = {stripe: deque() for stripe in range(64)}
        self.free_at = dict.fromkeys(range(64), 0.0)
        self.ack_ranges, self.acks, self.acked = AckRanges(), deque(), []
        self.now, self.index = 0.0, 0

    def run(self, seconds, *, stall=(), step_s=0.002):
        """Always have data to send. Return the most bytes in flight, and the bytes that arrived."""
        bulk, got, most, end = self.bulk, 0, 0, self.now + seconds
        while self.now < end:
            self.now = now = self.now + step_s
            while self.acks and self.acks[0][0] <= now:
                bulk.on_ack(*self.acks.popleft()[1], now)
            if now >= bulk.next_deadline():
                for stripe, seq in bulk.handle_timer(now):
                    self.put(stripe, seq, True, 0, stall)
            while bulk.takes_chunks:
                bulk.add(1, 0, self.index, bytes(256 * KIB))
                self.index += 1
            for stripe, seq, asks, piece in send_all(bulk, now):
                self.put(stripe, seq, asks, len(piece.data), stall)
            for stripe, lane in self.lanes.items():
                while lane and lane[0][0] <= now:
                    _, seq, asks, size = lane.popleft()
                    got += size
                    acked = self.ack_ranges.on_piece(stripe, seq, asks=asks)
                    self.acked.extend(acked)
                    self.acks.extend((now + self.delay_s, one) for one in acked)
            most = max(most, sum(one.in_flight for one in bulk._stripes.values()))
        return most, got

    def put(self, stripe, seq, asks, size, stall):
        """Send a piece into the path."""
        if stripe not in stall:
            self.free_at[stripe] = max(self.now, self.free_at[stripe]) + size / self.rate
            self.lanes[stripe].append((self.free_at[stripe] + self.delay_s, seq, asks, size))


@pytest.mark.parametrize(
    ("rate", "delay_s"), [(1.25e6, 0.03), (25e6, 0.045), (125e6, 0.005), (0.2e6, 0.3)]
)
def test_the_window_suits_the_path(rate, delay_s):
    """The path is full, without a queue that would delay control messages."""
    bulk = sender()
    path = Path(bulk, rate=rate, delay_s=delay_s)
    path.run(5.0)
    most, got = path.run(5.0)
    assert got > 0.93 * rate * 5.0
    stripe = bulk._stripes[0]
    queue_s = (most - rate * 2 * delay_s) / rate
    assert queue_s < 1.2 * (2 * delay_s + 4 * stripe.piece_bytes / rate) + 0.02
    product = WINDOW_GAIN * rate * 2 * delay_s + min(rate * BUSY_LOOP_S, BUSY_LOOP_BYTES)
    assert stripe.piece_bytes <= max(MIN_PIECE_BYTES, 1.2 * product / PIECES_PER_WINDOW)
    assert stripe.piece_bytes >= min(0.5 * 0.9 * product / PIECES_PER_WINDOW, 1 << 20)


def test_a_small_chunk_uses_all_connections():
    """TCP restarts with ten segments per connection: more connections need fewer round trips."""
    bulk = sender(16)
    bulk.congestion_window.window = 1 << 20
    bulk.add(1, 0, 0, bytes(97_000))
    sent = send_all(bulk)
    assert [stripe for stripe, *_ in sent] == list(range(8))
    sizes = [len(piece.data) for *_, piece in sent]
    assert sum(sizes) == 97_000
    assert max(sizes) <= INITIAL_FLIGHT_BYTES
    assert max(sizes) - min(sizes) < 8


def test_a_stalled_stripe_does_not_stall_the_transfer():
    """Its pieces are resent on the others, and it gets no more until it answers."""
    bulk = sender(4)
    path = Path(bulk, rate=1e6, delay_s=0.02)
    _, before = path.run(3.0)
    _, after = path.run(3.0, stall={2})
    assert bulk._stripes[2].is_suspect
    assert bulk.resent_bytes > 0
    assert after > 0.65 * before  # three of four, less the probe timeout
    assert not [one.piece for one in bulk._stripes[2].sent if one.piece is not None]


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


def test_a_gap_is_a_loss():
    """A stripe keeps its order, so a later piece's arrival proves that an earlier one is lost."""
    bulk = sender()
    for index in range(3):
        bulk.add(1, 0, index, bytes(10_000))
    assert len(send_all(bulk)) == 3
    bulk.on_ack(0, 1, 1, 0.1)
    bulk.on_ack(0, 3, 3, 0.1)
    ((_, seq, _, piece),) = send_all(bulk, 0.1)
    assert (seq, piece.index) == (4, 1)
    assert bulk._stripes[0].in_flight == 10_000


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


@given(
    seed=st.integers(0, 1 << 32),
    stripes=st.integers(1, 5),
    loss=st.floats(0, 0.5),
    sizes=st.lists(st.integers(0, 200_000), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_everything_arrives_over_bad_stripes(seed, stripes, loss, sizes):
    """Pieces and acknowledgements are lost, stripes overtake each other; all chunks arrive."""
    rng = random.Random(seed)
    bulk, ack_ranges = sender(stripes, min_probe_timeout_s=0.1), AckRanges()
    data = [rng.randbytes(size) for size in sizes]
    parts, whole = {}, {}
    lanes = [deque() for _ in range(stripes)]
    left, now = list(enumerate(data)), 0.0
    for _ in range(20_000):
        if len(whole) == len(data):
            break
        now += 0.01
        while left and bulk.takes_chunks:
            bulk.add(1, 0, *left.pop(0))
        for stripe, seq, asks, piece in send_all(bulk, now):
            if rng.random() >= loss:
                lanes[stripe].append((seq, asks, piece))
        if now >= bulk.next_deadline():
            for stripe, seq in bulk.handle_timer(now):
                if rng.random() >= loss:
                    lanes[stripe].append((seq, True, None))
        if not any(lanes):
            now = max(now, bulk.next_deadline())  # only a timeout is left to happen
            continue
        stripe = rng.choice([one for one in range(stripes) if lanes[one]])
        seq, asks, piece = lanes[stripe].popleft()
        if piece is not None and piece.index not in whole:
            reassembly = parts.setdefault(piece.index, Reassembly(piece.size, 0))
            found = reassembly.add(piece_of(piece.data, offset=piece.offset, size=piece.size))
            if found is not None:
                whole[piece.index] = bytes(found)
        for acked in ack_ranges.on_piece(stripe, seq, asks=asks):
            if rng.random() >= loss:
                bulk.on_ack(*acked, now)
    assert [whole[index] for index in range(len(data))] == data

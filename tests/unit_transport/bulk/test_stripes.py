"""The stripes' machines: windows, lost and stalled connections, pieces, how many there are; without any network."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_transport import PeerError
from fsl_transport.bulk.congestion_window import BUSY_LOOP_BYTES, BUSY_LOOP_S
from fsl_transport.bulk.reassembly import Arrivals, Assembly, EagerChunks
from fsl_transport.bulk.stripes import (
    FIRST_FLIGHT_BYTES,
    LEAST_PIECE_BYTES,
    PIECES_PER_WINDOW,
    WINDOW_GAIN,
    BulkSender,
)
from fsl_transport.session.frames import Chunk

KIB = 1024


def sender(count=1, *, piece=1 << 20, window=1 << 26, patience_s=0.5):
    made = BulkSender(patience_s=patience_s, piece_limit=piece, window_limit=window)
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


def test_a_chunk_is_cut_and_put_together_again():
    """What arrives must be the chunk, whatever the pieces and their order."""
    bulk = sender()
    data = bytes(range(256)) * 900
    bulk.add(7, 2, 5, data)
    pieces = [piece for *_, piece in send_all(bulk)]
    while bulk.is_busy:
        bulk.taken(0, 1, len(pieces), 0.1)
        pieces += [piece for *_, piece in send_all(bulk, 0.1)]
    assert len(pieces) > 2
    assert {(one.stream, one.round, one.index, one.size) for one in pieces} == {
        (7, 2, 5, len(data))
    }
    assembly = Assembly(len(data), 2)
    random.Random(1).shuffle(pieces)
    found = [assembly.add(piece_of(one.data, offset=one.offset, size=one.size)) for one in pieces]
    assert found[:-1] == [None] * (len(pieces) - 1)
    assert bytes(found[-1]) == data


def test_bytes_are_not_copied_and_what_can_change_is():
    """The send path's largest cost would be a copy; and nobody may change what may go again."""
    bulk = sender()
    data = bytes(30_000)
    bulk.add(1, 0, 0, data)
    (_, _, _, first), *_ = send_all(bulk)
    assert first.data.obj is data
    bulk.taken(0, 1, 2, 0.1)
    mutable = bytearray(b"abc")
    bulk.add(1, 0, 1, mutable)
    (_, _, _, piece), *_ = send_all(bulk)
    mutable[0] = 0
    assert bytes(piece.data) == b"abc"


def test_no_more_than_a_window_is_under_way():
    """A connection that was never measured gets little."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(1 << 20))
    sent = send_all(bulk)
    assert sum(len(piece.data) for *_, piece in sent) == 2 * LEAST_PIECE_BYTES
    assert bulk.is_busy
    assert any(
        asks for _, _, asks, _ in sent[:2]
    )  # an answer comes long before the window is used up
    bulk.taken(0, 1, 2, 0.1)
    assert send_all(bulk, 0.1)


def test_a_full_window_asks_for_few_answers():
    """An answer costs both ends more than a piece; each one that frees a window must not ask for the next."""
    bulk = sender()
    line = Line(bulk, rate=25e6, delay_s=0.01)
    line.run(3.0)
    before, answers = bulk.delivered, len(line.told)
    line.run(3.0)
    window = min(bulk.line.window, bulk._stripes[0].window)
    assert len(line.told) - answers < 6 * (bulk.delivered - before) / window


def test_who_waits_has_asked():
    """A window that shrinks below what went out unasked would wait for an answer that nobody owes."""
    bulk = sender()
    line = Line(bulk, rate=25e6, delay_s=0.01)
    line.run(3.0)
    bulk.taken(0, bulk._stripes[0].sent[0].seq, bulk._stripes[0].seq, line.now)
    bulk.add(1, 0, line.index, bytes(64 * KIB))
    (_, _, first_asks, _) = bulk.next(line.now)
    assert not first_asks
    bulk.line.window = 1
    ((_, _, asks, _),) = send_all(bulk, line.now)
    assert asks


class Line:
    """``rate`` bytes a second for each stripe and a delay each way; acknowledgements take no room.

    No packets and no TCP, which ``simulated_line`` in tests/support has: ten seconds of 25 MB/s take 0.05 s here, and 20 s there.
    """

    def __init__(self, bulk, *, rate, delay_s):
        self.bulk, self.rate, self.delay_s = bulk, rate, delay_s
        self.lanes = {stripe: deque() for stripe in range(64)}
        self.free_at = dict.fromkeys(range(64), 0.0)
        self.arrivals, self.acks, self.told = Arrivals(), deque(), []
        self.now, self.index = 0.0, 0

    def run(self, seconds, *, stall=(), step_s=0.002):
        """With always something to send. Most bytes under way, and those that arrived."""
        bulk, got, most, end = self.bulk, 0, 0, self.now + seconds
        while self.now < end:
            self.now = now = self.now + step_s
            while self.acks and self.acks[0][0] <= now:
                bulk.taken(*self.acks.popleft()[1], now)
            if now >= bulk.next_deadline():
                for stripe, seq in bulk.handle_timer(now):
                    self.put(stripe, seq, True, 0, stall)
            while bulk.has_room:
                bulk.add(1, 0, self.index, bytes(256 * KIB))
                self.index += 1
            for stripe, seq, asks, piece in send_all(bulk, now):
                self.put(stripe, seq, asks, len(piece.data), stall)
            for stripe, lane in self.lanes.items():
                while lane and lane[0][0] <= now:
                    _, seq, asks, size = lane.popleft()
                    got += size
                    told = self.arrivals.piece(stripe, seq, asks=asks)
                    self.told.extend(told)
                    self.acks.extend((now + self.delay_s, one) for one in told)
            most = max(most, sum(one.in_flight for one in bulk._stripes.values()))
        return most, got

    def put(self, stripe, seq, asks, size, stall):
        """A piece enters the line."""
        if stripe not in stall:
            self.free_at[stripe] = max(self.now, self.free_at[stripe]) + size / self.rate
            self.lanes[stripe].append((self.free_at[stripe] + self.delay_s, seq, asks, size))


@pytest.mark.parametrize(
    ("rate", "delay_s"), [(1.25e6, 0.03), (25e6, 0.045), (125e6, 0.005), (0.2e6, 0.3)]
)
def test_the_window_is_that_of_the_line(rate, delay_s):
    """A full line, and behind it no queue that a control message would wait in for long."""
    bulk = sender()
    line = Line(bulk, rate=rate, delay_s=delay_s)
    line.run(5.0)
    most, got = line.run(5.0)
    assert got > 0.93 * rate * 5.0
    stripe = bulk._stripes[0]
    queue_s = (most - rate * 2 * delay_s) / rate
    assert queue_s < 1.2 * (2 * delay_s + 4 * stripe.piece_bytes / rate) + 0.02
    product = WINDOW_GAIN * rate * 2 * delay_s + min(rate * BUSY_LOOP_S, BUSY_LOOP_BYTES)
    assert stripe.piece_bytes <= max(LEAST_PIECE_BYTES, 1.2 * product / PIECES_PER_WINDOW)
    assert stripe.piece_bytes >= min(0.5 * 0.9 * product / PIECES_PER_WINDOW, 1 << 20)


def test_a_piece_is_no_more_than_a_chunk():
    """Whatever the line could take."""
    bulk = BulkSender(patience_s=0.5, piece_limit=100_000, window_limit=1 << 26)
    Line(bulk, rate=125e6, delay_s=0.02).run(2.0)
    assert bulk._stripes[0].piece_bytes == 100_000


def test_pieces_follow_the_product_and_not_the_speed_alone():
    """At one speed, a longer line gets larger pieces."""
    sizes = []
    for delay_s in (0.002, 0.03, 0.15, 0.6):
        bulk = sender()
        Line(bulk, rate=1.25e6, delay_s=delay_s).run(5.0 + 20 * delay_s)
        sizes.append(bulk._stripes[0].piece_bytes)
    assert sizes[0] == LEAST_PIECE_BYTES
    assert sizes == sorted(set(sizes))


def test_a_queue_of_our_own_does_not_feed_itself():
    """The round trip that sizes the window must not be the one that the window makes longer."""
    line = Line(sender(), rate=1.25e6, delay_s=0.03)
    most = [line.run(10.0, step_s=0.005)[0] for _ in range(6)]
    assert max(most[1:]) < 1.3 * most[0]


def test_the_freest_stripe_takes_the_next_piece():
    """A slow stripe must carry less, not hold the others back."""
    bulk = sender(2)
    bulk.add(1, 0, 0, bytes(1 << 20))
    sent = send_all(bulk)
    carried = {stripe: sum(len(p.data) for s, _, _, p in sent if s == stripe) for stripe in (0, 1)}
    assert carried == {0: 2 * LEAST_PIECE_BYTES, 1: 2 * LEAST_PIECE_BYTES}
    bulk.taken(1, 1, 2, 0.05)
    assert {stripe for stripe, *_ in send_all(bulk, 0.05)} == {1}


def test_what_is_small_goes_over_all_connections():
    """TCP begins each burst anew with ten segments for each connection: the more of them, the fewer round trips."""
    bulk = sender(16)
    bulk.line.window = 1 << 20
    bulk.add(1, 0, 0, bytes(97_000))
    sent = send_all(bulk)
    assert [stripe for stripe, *_ in sent] == list(range(8))
    sizes = [len(piece.data) for *_, piece in sent]
    assert sum(sizes) == 97_000
    assert max(sizes) <= FIRST_FLIGHT_BYTES
    assert max(sizes) - min(sizes) < 8


def test_a_small_stream_does_not_prefer_the_connection_that_carried_most():
    """Windows are of use where they are full; before, the first connection got most of each burst, because it had got most of those before."""
    bulk = sender(16)
    bulk.line.window = 1 << 20
    for stripe in bulk._stripes.values():
        stripe.window, stripe.piece_bytes = 100_000, 1 << 16
    first = bulk._stripes[0]
    first.window, first.piece_bytes = 1 << 20, 1 << 18
    carried = dict.fromkeys(range(16), 0)
    for index in range(4):  # as they are coded
        bulk.add(1, 0, index, bytes(140_000), chunks=4)
        for stripe, _, _, piece in send_all(bulk):
            carried[stripe] += len(piece.data)
    assert set(carried.values()) == {35_000}


def test_a_large_stream_goes_in_large_pieces_from_its_first_chunk_on():
    """Whatever waits just now: a slow source must not make it cost more."""
    bulk = sender(16)
    bulk.line.window = 1 << 24
    for stripe in bulk._stripes.values():
        stripe.window, stripe.piece_bytes = 1 << 20, 1 << 16
    bulk.add(1, 0, 0, bytes(1 << 18), chunks=1000)
    assert [len(piece.data) for *_, piece in send_all(bulk)] == [1 << 16] * 4


@pytest.mark.parametrize("stripes", [4, 16])
def test_what_has_to_wait_goes_in_pieces_of_what_a_connection_carries(stripes):
    """Once windows are full, small pieces would only cost time; and who carries more gets more."""
    bulk = sender(stripes)
    for stripe in bulk._stripes.values():
        stripe.window, stripe.piece_bytes = 1 << 18, 1 << 16
    bulk._stripes[3].window = 1 << 20
    bulk.line.window = 1 << 17
    for index in range(2):
        bulk.add(1, 0, index, bytes(400_000))
    carried = dict.fromkeys(range(stripes), 0)
    sent = send_all(bulk)
    bulk.line.window = 1 << 22
    later = send_all(bulk)
    for stripe, _, _, piece in sent + later:
        carried[stripe] += len(piece.data)
    assert [len(piece.data) for *_, piece in later[:2]] == [1 << 16] * 2
    assert stripes > 4 or carried[3] > 2 * carried[2]


def test_a_stripe_that_stands_does_not_hold_the_transfer():
    """Its pieces go again on the others, and it gets no more until it answers."""
    bulk = sender(4)
    line = Line(bulk, rate=1e6, delay_s=0.02)
    _, before = line.run(3.0)
    _, after = line.run(3.0, stall={2})
    assert bulk._stripes[2].is_suspect
    assert bulk.sent_again > 0
    assert after > 0.65 * before  # three of four, and the pause until it was found out
    assert not [one.piece for one in bulk._stripes[2].sent if one.piece is not None]


def test_a_lone_stripe_is_probed_before_anything_goes_twice():
    """TCP may only be busy with a loss: what is on its way would be sent for nothing."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(20_000))
    assert len(send_all(bulk)) == 1
    when = bulk.next_deadline()
    assert bulk.handle_timer(when - 0.01) == []
    assert bulk.handle_timer(when) == [(0, 2)]
    assert bulk.next(when) is None
    assert bulk.next_deadline() > when + 1.0  # patience doubles
    bulk.taken(0, 2, 2, when + 1)  # the probe came, the piece did not
    ((stripe, seq, asks, piece),) = send_all(bulk, when + 1)
    assert (stripe, seq, asks, len(piece.data)) == (0, 3, True, 20_000)
    assert bulk.sent_again == 20_000


def test_a_tiny_piece_does_not_make_a_patient_stripe():
    """Five bytes in 0.06 s are no measurement of a line: what is lost after them was waited for for minutes."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(5))
    send_all(bulk)
    bulk.taken(0, 1, 1, 0.06)
    bulk.add(1, 0, 1, bytes(30_000))
    assert send_all(bulk, 1.0)
    assert bulk.next_deadline() < 1.0 + 11


def test_a_gap_is_a_loss():
    """A stripe keeps its order, so that a younger piece's arrival proves an older one's loss."""
    bulk = sender()
    for index in range(3):
        bulk.add(1, 0, index, bytes(10_000))
    assert len(send_all(bulk)) == 3
    bulk.taken(0, 1, 1, 0.1)
    bulk.taken(0, 3, 3, 0.1)
    ((_, seq, _, piece),) = send_all(bulk, 0.1)
    assert (seq, piece.index) == (4, 1)
    assert bulk._stripes[0].in_flight == 10_000


def test_what_is_forgotten_does_not_go_again():
    """A stream that was stopped must cost the line nothing more."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(10_000))
    bulk.add(2, 0, 0, bytes(10_000))
    send_all(bulk)
    bulk.add(1, 0, 1, bytes(10_000))
    bulk.forget(1)
    assert send_all(bulk) == []
    bulk.handle_timer(bulk.next_deadline())
    bulk.taken(0, 3, 3, 2.0)
    assert [piece.stream for *_, piece in send_all(bulk, 2.0)] == [2]


def test_what_was_not_sent_was_not_taken():
    """A peer that acknowledges the future is in error."""
    bulk = sender()
    bulk.add(1, 0, 0, bytes(10))
    send_all(bulk)
    for stripe, first, last in ((0, 1, 2), (0, 0, 1), (0, 2, 1), (5, 1, 1)):
        with pytest.raises(PeerError, match="not sent"):
            bulk.taken(stripe, first, last, 1.0)
    bulk.taken(0, 1, 1, 1.0)
    bulk.taken(0, 1, 1, 1.0)  # said twice


def test_a_connection_counts_once_it_has_answered():
    """Nothing is risked on one that may never come up."""
    bulk = sender()
    bulk.count = 2
    assert bulk.probe(1, 0.0) == 1
    bulk.add(1, 0, 0, bytes(1 << 20))
    assert {stripe for stripe, *_ in send_all(bulk)} == {0}
    when = bulk.next_deadline()
    assert (1, 2) in bulk.handle_timer(when)  # the probe may be lost
    bulk.taken(1, 2, 2, when + 0.1)
    assert {stripe for stripe, *_ in send_all(bulk, when + 0.1)} == {1}
    bulk.count = 1
    bulk.taken(0, 1, 1, when + 0.2)
    assert {stripe for stripe, *_ in send_all(bulk, when + 0.2)} <= {0}


def test_arrivals_are_told_when_asked_and_when_something_is_missing():
    """Few acknowledgements where all is well, an early one where not."""
    arrivals = Arrivals()
    assert list(arrivals.piece(3, 1, asks=False)) == []
    assert list(arrivals.piece(3, 2, asks=True)) == [(3, 1, 2)]
    assert list(arrivals.piece(3, 3, asks=False)) == []
    assert list(arrivals.piece(3, 6, asks=False)) == [(3, 3, 3), (3, 6, 6)]
    assert list(arrivals.piece(0, 1, asks=True)) == [(0, 1, 1)]
    for stripe, seq in ((64, 1), (-1, 1), (0, 0)):
        with pytest.raises(PeerError):
            arrivals.piece(stripe, seq, asks=True)


def test_pieces_that_overlap_are_an_error():
    """More bytes than the chunk has must not be counted as a whole one."""
    assembly = Assembly(100, 0)
    assert assembly.add(piece_of(bytes(60), size=100)) is None
    assert assembly.add(piece_of(bytes(60), size=100)) is None  # the same again
    with pytest.raises(PeerError, match="overlap"):
        assembly.add(piece_of(bytes(60), offset=40, size=100))


def test_early_pieces_are_bounded():
    """Nobody has asked for them."""
    eager = EagerChunks()
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
    """Pieces and acknowledgements are lost, stripes overtake each other: every chunk comes together in the end."""
    chance = random.Random(seed)
    bulk, arrivals = sender(stripes, patience_s=0.1), Arrivals()
    data = [chance.randbytes(size) for size in sizes]
    parts, whole = {}, {}
    lanes = [deque() for _ in range(stripes)]
    left, now = list(enumerate(data)), 0.0
    for _ in range(20_000):
        if len(whole) == len(data):
            break
        now += 0.01
        while left and bulk.has_room:
            bulk.add(1, 0, *left.pop(0))
        for stripe, seq, asks, piece in send_all(bulk, now):
            if chance.random() >= loss:
                lanes[stripe].append((seq, asks, piece))
        if now >= bulk.next_deadline():
            for stripe, seq in bulk.handle_timer(now):
                if chance.random() >= loss:
                    lanes[stripe].append((seq, True, None))
        if not any(lanes):
            now = max(now, bulk.next_deadline())  # nobody has anything to do but to wait
            continue
        stripe = chance.choice([one for one in range(stripes) if lanes[one]])
        seq, asks, piece = lanes[stripe].popleft()
        if piece is not None and piece.index not in whole:
            assembly = parts.setdefault(piece.index, Assembly(piece.size, 0))
            found = assembly.add(piece_of(piece.data, offset=piece.offset, size=piece.size))
            if found is not None:
                whole[piece.index] = bytes(found)
        for told in arrivals.piece(stripe, seq, asks=asks):
            if chance.random() >= loss:
                bulk.taken(*told, now)
    assert [whole[index] for index in range(len(data))] == data

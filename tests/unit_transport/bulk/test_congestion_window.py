"""The window of a line, over all connections: full lines and short queues, whatever the number of connections; in a simulated line."""

import pytest
from simulated_line import Conditions, Line

from fsl_transport.bulk.congestion_window import (
    BUSY_LOOP_S,
    FILLING_GAIN,
    FIRST_WINDOW_BYTES,
    LEAST_GAIN,
    MOST_GAIN,
    SEEK_EVERY_S,
    CongestionWindow,
)
from fsl_transport.bulk.parallelism import Trial

DSL = Conditions(rate=1.25e6, delay_s=0.03, buffer_s=0.2)
LONG = Conditions(rate=10e6, delay_s=0.045, loss=0.001)
LOSSY = Conditions(rate=10e6, delay_s=0.025, loss=0.01)


@pytest.mark.parametrize("stripes", [None, 1, 8, 64])
def test_a_thin_line_is_full_and_not_flooded(stripes):
    """However many connections begin at once, no control message may wait behind what they send together."""
    line = Line(DSL, stripes=stripes)
    first = line.run(2.0)
    assert first.queue_s < 0.2
    later = line.run(8.0)
    assert later.use > 0.9
    assert later.queue_s < 0.19
    assert later.late_s < 0.25
    assert first.dropped == later.dropped == 0


def test_a_long_line_with_losses_is_filled_within_seconds():
    """What one connection cannot do: it is found how many are needed, and they are not held back by each other's losses."""
    alone = Line(LONG, stripes=1)
    alone.run(3.0)
    line = Line(LONG)
    line.run(3.0)
    assert line.count.count >= 32
    assert line.run(5.0).use > max(0.88, 2 * alone.run(5.0).use)


@pytest.mark.parametrize("seed", range(3))
def test_one_lost_packet_in_a_hundred(seed):
    """There most connections have a hole in them at any time, and the window must not shrink with what arrives."""
    alone = Line(LOSSY, stripes=1, seed=seed)
    alone.run(2.0)
    line = Line(LOSSY, seed=seed)
    line.run(4.0)
    assert line.run(3.0).use > 12 * alone.run(3.0).use


@pytest.mark.parametrize(
    ("chunks", "round_trips"),
    [((64_000,), 0), ((97_000,), 0), ((140_000,) * 4, 2), ((195_000, 195_000), 1)],
)
def test_a_burst_after_a_pause_takes_no_more_round_trips_than_it_must(chunks, round_trips):
    """A model at the end of a round, a batch of activations: TCP has forgotten what it knew of the line, and sixteen connections bring ten segments each at once."""
    line = Line(Conditions(rate=25e6, delay_s=0.045), endless=False)
    took = []
    for _ in range(8):
        took.append(line.burst(*chunks))
        line.run(6.0)
    on_the_line_s = 1.1 * sum(chunks) / 25e6 + 0.005
    assert max(took[2:]) < 0.045 + 0.09 * round_trips + on_the_line_s


def test_sixty_four_at_once_put_no_more_into_the_line_than_one():
    """Before the first answer nobody knows what the line brings."""
    for stripes in (1, 64):
        line = Line(DSL, stripes=stripes)
        if stripes > 1:
            line.run(0.13)  # their probes are answered; the first pieces were one connection's
        assert (
            sum(one.in_flight for one in line.bulk._stripes.values()) <= FIRST_WINDOW_BYTES + 16384
        )


def taken(line, count, *, now, took_s, size=1 << 20, waits=False, held_up=False):
    """``count`` pieces come after ``took_s``, at their line's speed."""
    for _ in range(count):
        if waits:
            line.waited_for()
        for late in (0.6 * took_s, 0.0) if held_up else (0.0,):
            line.taken(
                size // 2 if late else size, sent_at=now - took_s - late, then=(line.delivered, now - took_s),
                is_busy=True, piece_bytes=16_384, now=now,
            )  # fmt: skip
        now += took_s
    return now


def test_the_gain_grows_while_losses_and_not_a_queue_hold_it_up():
    """Pieces that wait for a lost one fill the window, and not the line."""
    line = CongestionWindow(1 << 30)
    now = taken(line, 10, now=1.0, took_s=0.1)
    assert line.gain == FILLING_GAIN
    now = taken(line, 10, now=now, took_s=0.1, waits=True)
    assert line.gain == FILLING_GAIN, "nothing was held up"
    now = taken(line, 10, now=now, took_s=0.1, held_up=True)
    assert line.gain == FILLING_GAIN, "nobody waited for the window"
    now = taken(line, 10, now=now, took_s=0.1, waits=True, held_up=True)
    assert line.gain == MOST_GAIN
    taken(line, 20, now=now, took_s=0.4, waits=True, held_up=True)
    assert line.gain == LEAST_GAIN, "a queue"


def test_what_the_line_needs_is_without_allowances():
    """For a receiver's credit: what waits in this process, and how large a piece is, has nothing to do with the line."""
    line = CongestionWindow(1 << 30)
    assert line.needs == FIRST_WINDOW_BYTES
    now = taken(line, 1, now=1.0, took_s=0.1)
    product = line.rate * line.round_trip_s
    assert line.needs == pytest.approx(FILLING_GAIN * product, rel=0.01)
    assert line.window == pytest.approx(line.needs + line.rate * BUSY_LOOP_S + 2 * 16_384, rel=0.01)
    needs = line.needs
    now = taken(line, 1, now=now + 3.0, took_s=0.1, size=1000)
    now = taken(line, 1, now=now + 3.0, took_s=0.1, size=1000)
    assert line.rate < needs
    assert line.needs == needs, "it takes nothing back while it is being filled"
    line.bound(1000)
    assert line.needs == 1000


def test_what_a_loss_held_up_is_no_speed():
    """It comes in a burst when the hole is filled, and a window made of that would flood the line."""
    line = CongestionWindow(1 << 30)
    now = taken(line, 10, now=1.0, took_s=0.1)
    rate, window = line.rate, line.window
    for _ in range(20):
        line.taken(
            1 << 16,
            sent_at=now - 0.5,
            then=(0, now - 0.5),
            is_busy=True,
            piece_bytes=16_384,
            now=now,
        )
    assert (line.rate, line.window) == (rate, window)


def test_a_base_that_is_old_is_sought_anew():
    """A line may get longer, and a queue of our own looks as if it had."""
    line = CongestionWindow(1 << 30)
    now = taken(line, 10, now=1.0, took_s=0.1)
    assert line.round_trip_s == pytest.approx(0.1)
    window, begun = line.window, now
    while line.window > 0.4 * window and now < begun + 2 * SEEK_EVERY_S:
        now = taken(line, 1, now=now, took_s=0.2, size=2 << 20)
    assert SEEK_EVERY_S - 1 < now - begun < SEEK_EVERY_S + 1
    assert line.needs > 0.9 * window, "which is not what a stream that begins now will need"
    now = taken(line, 5, now=now, took_s=0.13, size=1 << 20)
    assert line.round_trip_s == pytest.approx(0.13), "it is longer, and not as long as with a queue"
    assert line.window > window / 2


def test_an_empty_line_has_no_queue_to_look_behind():
    """Little is sent now and then: half a window would only hold it up. And the line may have got longer meanwhile, or shorter."""
    line = CongestionWindow(1 << 30)
    now = taken(line, 10, now=1.0, took_s=0.1)
    window = line.window
    for took_s in (0.2, 0.05):
        now += 2 * SEEK_EVERY_S
        mark = line.mark(now, is_empty=True)
        assert line.window == window, "the first pieces of a burst go as ever"
        line.taken(1 << 20, sent_at=now, then=mark, is_busy=False, piece_bytes=16_384, now=now + took_s)  # fmt: skip
        assert line.round_trip_s == pytest.approx(took_s)
        assert line.window > 1 << 20
        now, window = now + took_s, line.window
    line.mark(now + 1.0, is_empty=True)
    assert line.round_trip_s == pytest.approx(0.05), "what is not old is kept"


def test_the_limit_holds_while_a_base_is_sought():
    """On a fast line half of what fills it is more than there may be."""
    limit = 4 << 20
    line = CongestionWindow(limit)
    now = taken(line, 10, now=1.0, took_s=0.1, size=64 << 20)
    most, begun = 0, now
    while now < begun + 2 * SEEK_EVERY_S:
        now = taken(line, 1, now=now, took_s=0.2, size=128 << 20)
        most = max(most, line.window)
    assert line.rate * line.round_trip_s > 4 * limit
    assert most == limit
    assert line.needs <= limit
    line.bound(limit // 2)
    assert line.window == line.needs == limit // 2
    taken(line, 1, now=now, took_s=0.2, size=128 << 20)
    assert line.window == limit // 2


def test_a_thin_line_goes_back_to_few():
    """Connections that bring nothing are given up, one trial after the other."""
    line = Line(DSL)
    line.run(3.0)
    most = line.count.count
    line.run(47.0)
    assert line.count.count < most
    assert line.count.trial is not Trial.GROWING

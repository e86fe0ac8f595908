"""The congestion window: full paths and short queues, however many connections; simulated paths."""

import pytest
from simulated_path import Conditions, Path

from fsl_transport.bulk.congestion_window import PROBE_RTT_EVERY_S, CongestionWindow
from fsl_transport.bulk.parallelism import State

DSL = Conditions(rate=1.25e6, delay_s=0.03, buffer_s=0.2)
LONG = Conditions(rate=10e6, delay_s=0.045, loss=0.001)
LOSSY = Conditions(rate=10e6, delay_s=0.025, loss=0.01)


@pytest.mark.parametrize("stripes", [None, 1, 64])
def test_a_slow_path_is_full_and_has_a_short_queue(stripes):
    """However many connections start at once, control messages must not queue behind them."""
    path = Path(DSL, stripes=stripes)
    first = path.run(2.0)
    assert first.queue_s < 0.2
    later = path.run(8.0)
    assert later.use > 0.9
    assert later.queue_s < 0.19
    assert later.late_s < 0.25
    assert first.dropped == later.dropped == 0


def test_a_long_path_with_losses_is_filled_within_seconds():
    """Enough connections are opened, and they are not slowed by each other's losses."""
    alone = Path(LONG, stripes=1)
    alone.run(3.0)
    path = Path(LONG)
    path.run(3.0)
    assert path.parallelism.count >= 32
    assert path.run(5.0).use > max(0.88, 2 * alone.run(5.0).use)


@pytest.mark.parametrize(
    ("chunks", "round_trips"),
    [((64_000,), 0), ((97_000,), 0), ((140_000,) * 4, 2), ((195_000, 195_000), 1)],
)
def test_a_burst_after_an_idle_time_takes_few_round_trips(chunks, round_trips):
    """TCP restarts slowly, but sixteen connections send ten segments each at once."""
    path = Path(Conditions(rate=25e6, delay_s=0.045), endless=False)
    took = []
    for _ in range(8):
        took.append(path.burst(*chunks))
        path.run(6.0)
    transmission_s = 1.1 * sum(chunks) / 25e6 + 0.005
    assert max(took[2:]) < 0.045 + 0.09 * round_trips + transmission_s


def ack(window, count, *, now, rtt_s, size=1 << 20, limited=False, delayed=False):
    """Acknowledge ``count`` pieces, each ``rtt_s`` after the one before."""
    for _ in range(count):
        if limited:
            window.on_limited()
        for late in (0.6 * rtt_s, 0.0) if delayed else (0.0,):
            window.on_ack(
                size // 2 if late else size,
                sent_at=now - rtt_s - late,
                sent_state=(window.delivered, now - rtt_s),
                is_busy=True,
                piece_bytes=16_384,
                now=now,
            )
        now += rtt_s
    return now


def test_an_old_min_rtt_is_measured_again():
    """A path may get longer, and the sender's own queue looks the same."""
    window = CongestionWindow(1 << 30)
    now = ack(window, 10, now=1.0, rtt_s=0.1)
    assert window.min_rtt_s == pytest.approx(0.1)
    before, begun = window.window, now
    while window.window > 0.4 * before and now < begun + 2 * PROBE_RTT_EVERY_S:
        now = ack(window, 1, now=now, rtt_s=0.2, size=2 << 20)
    assert PROBE_RTT_EVERY_S - 1 < now - begun < PROBE_RTT_EVERY_S + 1
    assert window.target > 0.9 * before, "a new stream will need as much as before"
    now = ack(window, 5, now=now, rtt_s=0.13, size=1 << 20)
    assert window.min_rtt_s == pytest.approx(0.13), "longer, but without the queue"
    assert window.window > before / 2


def test_the_limit_holds_in_probe_rtt():
    """On a fast path half a bandwidth-delay product is more than the limit."""
    limit = 4 << 20
    window = CongestionWindow(limit)
    now = ack(window, 10, now=1.0, rtt_s=0.1, size=64 << 20)
    most, begun = 0, now
    while now < begun + 2 * PROBE_RTT_EVERY_S:
        now = ack(window, 1, now=now, rtt_s=0.2, size=128 << 20)
        most = max(most, window.window)
    assert window.rate * window.min_rtt_s > 4 * limit
    assert most == limit
    assert window.target <= limit
    window.set_limit(limit // 2)
    assert window.window == window.target == limit // 2
    ack(window, 1, now=now, rtt_s=0.2, size=128 << 20)
    assert window.window == limit // 2


def test_a_slow_path_goes_back_to_few_connections():
    """Connections that bring nothing are given up, one trial after the other."""
    path = Path(DSL)
    path.run(3.0)
    most = path.parallelism.count
    path.run(47.0)
    assert path.parallelism.count < most
    assert path.parallelism.state is not State.STARTUP

"""The number of stripes: trials up and down, long paths, limits."""

import math

import pytest

from fsl_transport.bulk.parallelism import (
    FIRST_WAIT_S,
    LONG_START,
    PROBE_DOWN_S,
    Parallelism,
    State,
)


def simulate(
    rate, seconds, *,
    machine=None, limit=64, begun=0.0, idle=lambda now: False, rtt_s=0.01, useful=1,
):  # fmt: skip
    """Let the machine choose on a path that carries ``rate(stripes)`` bytes per second.

    Return the machine and its successive counts.
    """
    machine = machine or Parallelism(1, limit)
    delivered, now, counts = 0.0, begun, [machine.count]
    machine.begin_session()
    while now < begun + seconds:
        now += 0.02
        delivered += 0.02 * rate(machine.count)
        if idle(now):
            machine.on_idle(now)
        elif machine.update(
            now, int(delivered), open_count=machine.count, rtt_s=rtt_s, useful=useful
        ):
            counts.append(machine.count)
    return machine, counts


@pytest.mark.parametrize(
    ("first", "limit", "rate", "seconds", "starts", "ends", "most_changes"),
    [
        # One connection carries 1 MB/s, the path 25; then trials get rarer.
        (1, 64, lambda n: min(1e6 * n, 25e6), 600, [1, 2, 4, 8, 16, 32, 64], 32, 30),
        # Each connection costs a tenth.
        (16, 64, lambda n: 40e6 * 0.9 ** math.log2(n), 300, [16], 1, 20),
        # One fills the path: more would only compete with each other.
        (1, 64, lambda n: 1.25e6, 300, [1, 2, 1], 1, 16),
        (1, 6, lambda n: 1e6 * n, 60, [1, 2, 4, 6], 6, 20),
        # A fixed number: no trials.
        (8, 8, lambda n: 25e6, 300, [8], 8, 1),
    ],
    ids=["wide", "costly", "full", "limited", "fixed"],
)
def test_trials_end_with_the_number_that_the_path_needs(  # noqa: PLR0917
    first, limit, rate, seconds, starts, ends, most_changes
):
    """Doubled while that brings more, halved where half as many carry the same."""
    machine = Parallelism(1 if first < limit else first, limit)
    machine.count = first
    _, counts = simulate(rate, seconds, machine=machine)
    assert counts[: len(starts)] == starts
    assert machine.count == ends
    assert len(counts) <= most_changes


def test_a_long_path_starts_with_several():
    """A trial takes more than a second there: from one on, a full path would take half a minute."""
    machine, counts = simulate(lambda n: min(1e6 * n, 25e6), 6, rtt_s=0.09)
    assert counts[:3] == [1, LONG_START, 2 * LONG_START], "the first ack gives the RTT"
    assert machine.count == 2 * LONG_START
    machine, _ = simulate(lambda n: 1.25e6, 300, rtt_s=0.09)
    assert machine.count == 1, "reduced where one connection fills the path"
    _, counts = simulate(lambda n: 1e6 * n, 1, machine=machine, begun=400.0, rtt_s=0.09)
    assert counts == [1], "starts with the number found"
    machine, _ = simulate(lambda n: 1e6 * n, 3, limit=4, rtt_s=0.09)
    assert machine.count == 4
    machine = Parallelism(2 * LONG_START, 64)
    machine.update(0.0, 0, open_count=2 * LONG_START, rtt_s=0.09, useful=1)
    assert machine.count == 2 * LONG_START, "never fewer than the setting"


def test_startup_opens_as_many_as_the_window_makes_useful():
    """The window grows faster than trials could follow; once it has stopped, trials go on."""
    machine, counts = simulate(lambda n: 1e6 * n, 1.0, rtt_s=0.09, useful=40)
    assert counts == [1, 40]
    assert machine.state is State.STARTUP
    machine, counts = simulate(lambda n: 1e6 * n, 6, rtt_s=0.09, useful=100)
    assert counts == [1, 64], "no PROBE_DOWN for a while"
    _, counts = simulate(lambda n: 1e6 * n, PROBE_DOWN_S, machine=machine, begun=6.0, rtt_s=0.09)
    assert counts == [64, 32, 64], "then one"
    _, counts = simulate(lambda n: 1e6 * n, 6, rtt_s=0.01, useful=100)
    assert counts[:3] == [1, 2, 4], "a short path is tried from below"
    machine = Parallelism(1, 64)
    assert machine.update(0.0, 1, open_count=1, rtt_s=0.05, useful=1)
    assert machine.update(0.1, 1, open_count=16, rtt_s=0.001, useful=64)
    assert (machine.count, machine.state) == (1, State.HOLD), "the first ack was late"
    machine = Parallelism(4, 64)
    machine.update(0.0, 1, open_count=4, rtt_s=0.05, useful=1)
    machine.update(0.1, 1, open_count=16, rtt_s=0.001, useful=64)
    assert machine.count == 4, "never fewer than the setting"


def test_settings_bound_the_number_found():
    """A restarted server may allow fewer, or a fixed number."""
    machine, _ = simulate(lambda n: 1e6 * n, 20)
    machine.set_limits(1, 64)
    assert machine.count >= 32
    machine.set_limits(1, 4)
    assert (machine.count, machine.limit, machine.state) == (4, 4, State.HOLD)
    machine.set_limits(2, 2)
    machine, counts = simulate(lambda n: 1e6 * n, 20, machine=machine)
    assert counts == [2]
    machine.set_limits(1, 8)
    assert simulate(lambda n: 1e6 * n, 20, machine=machine)[0].count == 8
    machine = Parallelism(1, 64)
    machine.set_limits(4, 64)
    assert machine.count == 4, "a higher first number, with the same limit"
    machine.set_limits(1, 64)
    assert machine.count == 4


def test_a_path_that_changed_is_found():
    """Thirty stripes are too many once the losses are gone, and one too few once they are back."""
    machine, _ = simulate(lambda n: min(1e6 * n, 25e6), 20)
    machine, _ = simulate(lambda n: 25e6, 900, machine=machine, begun=20.0)
    assert machine.count <= 8
    machine, _ = simulate(lambda n: min(1e6 * n, 25e6), 900, machine=machine, begun=920.0)
    assert machine.count >= 16


def test_nothing_is_measured_while_there_is_nothing_to_send():
    """A slow encoder must not look like a slow path, nor an idle time like one."""
    machine, counts = simulate(lambda n: 1e6 * n, 60, idle=lambda now: int(now * 50) % 2 == 0)
    assert counts == [1]
    machine.on_idle(60.0)
    assert machine.state is State.HOLD
    machine, counts = simulate(lambda n: 1e6 * n, 20, machine=machine, begun=100.0)
    assert machine.count > 8


def test_trials_wait_for_their_connections():
    """An epoch measured before the connections are open would count against them."""
    machine = Parallelism(1, 64)
    now = 0.0
    while machine.count == 1:
        now += 0.02
        machine.update(now, int(1e6 * now), open_count=1, rtt_s=0.01, useful=1)
        assert now < 5
    changed_at = now
    while machine.count == 2:
        now += 0.02
        machine.update(now, int(1e6 * now), open_count=1, rtt_s=0.01, useful=1)
    assert now - changed_at > FIRST_WAIT_S
    assert machine.count == 1

"""Costs of many sites: the formulas of docs/COSTS.md."""

import pytest
from attrs import evolve
from scaling import (
    Measured,
    Sites,
    asynchronous,
    flat,
    grouped,
    groups_of,
    ring_s,
    stalled,
)

GBIT = 1e9 / 8
ONE = Sites(1e9, 4, GBIT)


def test_a_flat_sync_is_both_ways_over_one_line():
    """Without work of a processor: 4 deltas of 0.7 GB each way at 1 Gbit/s."""
    costs = flat(ONE, Measured(bits=5.6, stored_s=0.0, committed_s=0.0))
    assert costs.delta_bytes == pytest.approx(0.7e9)
    assert costs.sync_s == pytest.approx(2 * 4 * 0.7e9 / GBIT)
    assert costs.period_s == 2 * costs.sync_s
    assert costs.pause_s == 0.0


def test_storing_counts_where_it_is_slower_than_the_line():
    """A fast line does not make one thread faster."""
    fast = evolve(ONE, line=1e12)
    assert flat(fast, Measured()).sync_s == pytest.approx(4e9 * 13.9 / 2.4e9 + 5.9, rel=0.01)


def test_a_ring_of_four():
    """The figure of docs/ARCHITECTURE.md: 48 s."""
    assert ring_s(evolve(ONE, groups=4)) == pytest.approx(48.0)
    assert ring_s(ONE) == 0.0


def test_groups_help_where_the_near_line_is_better():
    """And not where one line carries all."""
    sites = Sites(7e9, 16, GBIT)
    some = evolve(sites, groups=groups_of(16))
    assert some.members == 4
    assert grouped(some, Measured()).period_s < flat(sites, Measured()).period_s / 3
    near = evolve(some, near=GBIT / 100)
    assert grouped(near, Measured()).period_s > flat(sites, Measured()).period_s


def test_clients_that_send_by_themselves_move_more_bytes():
    """Two versions come down for each delta."""
    known = Measured()
    assert asynchronous(ONE, known).server_bytes == pytest.approx(
        1.5 * flat(ONE, known).server_bytes
    )
    assert stalled(1e9, known, 2) == pytest.approx(stalled(1e9, known, 1) / 2)

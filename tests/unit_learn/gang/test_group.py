"""Ranks of one client agree: threads, each with its end of one group."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from ports import free_ports

from fsl_async.errors import TaskError
from fsl_async.learn.gang import group as group_module
from fsl_async.learn.gang.group import DOWN, RankGroup, check_parts, joined, uncovered
from fsl_async.learn.gang.link import Link, NodeLostError, Place
from fsl_async.learn.gang.orders import SUMS, RankOrders


def linked():
    """A node's end of a connection, and a rank's."""
    return [Link(end) for end in socket.socketpair()]


@pytest.fixture
def at_ranks(monkeypatch):
    """Call a function of a group in each of so many ranks; returns what it did, by rank."""
    # Ranks whose peer has failed do not wait for long.
    monkeypatch.setattr(group_module, "TIMEOUT", timedelta(seconds=60))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(world, function, machines=1):
        monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
        local = world // machines

        def one(rank):
            return function(RankGroup(Place(rank, world, 0, rank % local, local)))

        with ThreadPoolExecutor(world) as ranks:
            return list(ranks.map(one, range(world)))

    return run


def test_all_ranks_get_the_values_of_all(at_ranks):
    """Small ones in one collective, a large one of any rank in two."""

    def function(group):
        rank = group.place.rank
        return [group.gathered("x", [rank, size * "x" * rank]) for size in (1, 10_000, 0)]

    for found in at_ranks(3, function):
        for values, size in zip(found, (1, 10_000, 0), strict=True):
            assert values == [[rank, size * "x" * rank] for rank in range(3)]


def test_ranks_that_do_different_things_are_named(at_ranks, monkeypatch):
    """Else they would wait for each other, or take one thing for another."""
    monkeypatch.setattr(group_module, "APART_S", 0.05)
    apart = []

    def function(group):
        group.on_apart = lambda where: apart.append((group.place.rank, where))
        if group.place.rank:
            time.sleep(0.5)
        group.all_here("the end")
        with pytest.raises(TaskError, match=r"rank 0: fed.step; rank 1: fed.at_version"):
            group.gathered("fed.at_version" if group.place.rank else "fed.step")

    at_ranks(2, function)
    assert apart == [(0, "the end")]


def test_a_closed_group_has_no_threads(at_ranks):
    """One that frees an array after the end of Python aborts: a sixth of ranks did."""

    def threads():
        return len([*Path("/proc/self/task").iterdir()])

    def function(group):
        group.gathered("x")
        before = threads()
        group.close()
        return before - threads()

    (ended,) = at_ranks(1, function)
    assert ended > 0


def test_a_rank_that_ends_is_found_and_its_error_is_read(at_ranks):
    """A rank on another machine than the node leaves its error to rank 0."""

    def function(group):
        if group.place.rank:
            group.failed("no data", 2)
            del group  # closes its connections
            return None
        with pytest.raises(NodeLostError, match="another rank"):
            group.gathered("fed.step")
        return group.failure()

    assert at_ranks(2, function, machines=2) == [("no data", 2), None]


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_apply_the_same_directives_at_the_same_steps(at_ranks, seed):
    """Whenever these come; those that need parts of a vector once the last rank has them."""
    chance = random.Random(seed)
    world, machines = chance.choice([(3, 1), (4, 2), (3, 3)])
    node, link = linked()
    slots = {1: np.arange(12, dtype=np.float32)}

    def function(group):
        orders = RankOrders(group, link if group.leads else None, check_s=0.002)
        log, step = [], 0
        rank = group.place.rank
        orders.report = lambda: {"step": step, "tokens": 2 * step}
        orders.reads = [[(one, 12 - one)] for one in range(world)]
        orders.vectors = {1: np.zeros(12, np.float32)} if rank in group.remote else slots

        def based(number, slot):
            log.append((step, number))
            assert orders.vectors[slot][rank : 12 - rank].tolist() == [*range(rank, 12 - rank)]

        orders._handlers |= {"pace": lambda number: log.append((step, number)), "base": based}
        while not orders.released:
            step += 1
            time.sleep(0.001 * (rank == step % world))
            orders.asked()
        return log

    def direct():
        for number in range(40):
            time.sleep(chance.random() * 0.01)
            node.send(*(("base", number, 1) if chance.random() < 0.2 else ("pace", number)))
        node.send("leave")

    sender = threading.Thread(target=direct)
    sender.start()
    logs = at_ranks(world, function, machines)
    sender.join()
    assert [*map(len, logs)] == [40] * world
    assert all(log == logs[0] for log in logs)
    name, beat = node.receive()
    assert name == "beat"
    assert beat["tokens"] == 2 * beat["step"] * world


def test_a_directive_waits_for_its_parts(at_ranks):
    """Rank 0 has them, and the rank on another machine has not."""
    node, link = linked()
    node.send("base", 1, 1)

    def function(group):
        orders = RankOrders(group, link if group.leads else None)
        orders.report = lambda: {"step": 1, "tokens": 0}
        orders.reads, orders.vectors = [[(0, 3)]] * 2, {1: np.full(3, group.place.rank, np.float32)}
        if group.leads:  # a slow network
            orders._transfer, orders._arrived = lambda _: 1, 1
        for _ in range(3):
            orders.agree("fed.step")
            assert orders.base is None
        kept = group.send(orders.vectors[1], [(0, 3)], 1, DOWN) if group.leads else []
        while orders.base is None:
            orders.agree("fed.step")
        assert orders.vectors[1].tolist() == [0, 0, 0]
        return kept

    at_ranks(2, function, machines=2)


def test_a_new_slot_is_there_for_the_directive_behind_it(at_ranks, tmp_path):
    """The node sends both at once where all slots are in use, for a full fetch among others."""
    node, link = linked()
    np.arange(3, dtype=np.float32).tofile(tmp_path / "slot")
    node.send("slots", [4], [str(tmp_path / "slot")])
    node.send("base", 1, 4)

    def function(group):
        orders = RankOrders(group, link if group.leads else None)
        orders.report = lambda: {"step": 1, "tokens": 0}
        orders.reads, orders.values = [[(0, 3)]] * 2, 3
        while orders.base is None:
            orders.agree("fed.step")
        assert orders.vectors[4].tolist() == [0, 1, 2]

    at_ranks(2, function, machines=2)


@pytest.mark.parametrize(
    ("ranges", "place"),
    [
        ([(0, 10)], None),
        ([(4, 10), (0, 4)], None),
        ([(0, 4), (5, 10)], 4),
        ([(0, 6), (4, 10)], 4),
        ([(0, 4)], 4),
        ([(1, 10)], 0),
        ([], 0),
        ([(0, 10), (10, 12)], 10),
    ],
)
def test_ranges_must_be_all_values_once(ranges, place):
    """A value that two ranks write is torn; one that none writes is not of this model."""
    assert uncovered(ranges, 10) == place
    if place is None:
        check_parts(10, ["f", "f"], [ranges[:1], ranges[1:]])
        with pytest.raises(TaskError, match="pipeline"):
            check_parts(10, ["f", "g"], [ranges, []])
    else:
        with pytest.raises(TaskError, match=f"value {place} of the model"):
            check_parts(10, ["f"], [ranges])


def test_reports_of_ranks_are_joined():
    """Counts are sums, metrics are means, or the largest of some."""
    reports = [
        {"step": 5, "tokens": 40, "tokens_per_s": 3.0, "loss": 1.0},
        {"step": 5, "tokens": 50, "tokens_per_s": 4.0, "loss": 2.0, "not_finite": 1},
    ]
    found = {"step": 5.0, "tokens": 90.0, "tokens_per_s": 7.0, "loss": 1.5, "not_finite": 1.0}
    assert joined(reports, SUMS) == found

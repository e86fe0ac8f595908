"""Ranks that train one model with a node, against one plain process: real processes, no network.

Equal bits need sums in one order: `tests/conftest.py` fixes MKL's, and all use one thread.
"""

import numpy as np
import pytest
import torch
from gang_node import RATE, GangNode
from gang_program import build, loss_of, optimizer_of, part

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def node(tmp_path):
    """Make nodes, and end what they have started."""
    made = []

    def make(ranks, *arguments, **options):
        made.append(GangNode(tmp_path, ranks, *arguments, **options))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def trained(node, steps, syncs):
    """Train with syncs in between; returns what the ranks wrote, and the tokens of the deltas."""
    node.begin()
    tokens = 0
    for sync in range(1, syncs + 1):
        node.steps(sync * steps // (syncs + 1))
        found, delta = node.delta()
        tokens += found.tokens
        node.merge(delta)
    node.steps(steps)
    return node.end(), tokens


def replayed(log, steps, ranks, optimizer_name):
    """One plain process: the same batches, snapshots and moves at the same steps."""
    model = build()
    optimizer = optimizer_of(optimizer_name, model)
    versions, pending, reference = [], None, None
    orders = [tuple(one) for one in log]

    def vector():
        return torch.cat([one.detach().reshape(-1) for one in model.parameters()]).numpy().copy()

    def carry_out(step):
        nonlocal reference, pending
        while orders and orders[0][0] == step:
            _, kind, version = orders.pop(0)
            if kind == "snapshot":
                now = vector()
                pending, reference = reference - now, now
                continue
            if version == 0:
                versions.append(vector())
                reference = versions[0]
                continue
            versions.append(versions[-1] + -RATE * pending)
            moved = versions[-1] + (vector() - reference)
            reference = versions[-1]
            torch.nn.utils.vector_to_parameters(torch.from_numpy(moved), model.parameters())

    carry_out(0)
    for step in range(steps):
        for rank in range(ranks):
            (loss_of(model, *part(step, rank, ranks)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        carry_out(step + 1)
    return vector(), versions


@pytest.mark.parametrize(
    ("optimizer", "machines"),
    [
        ("adamw", 2),
        *(pytest.param(*one, marks=pytest.mark.sweep) for one in (("adamw", 1), ("sgd", 1))),
    ],
)
def test_two_ranks_are_one_process_to_the_bit(node, optimizer, machines):
    """Sharding, snapshots and rebases change no bit: halving a sum of two gradients is exact."""
    made = node(2, "fsdp", optimizer, machines=machines)
    ranks, tokens = trained(made, 60, 3)
    steps = ranks[0]["steps"]
    assert steps >= 60
    assert ranks[1]["log"] == ranks[0]["log"]
    assert ranks[1]["steps"] == steps
    last, versions = replayed(ranks[0]["log"], steps, 2, optimizer)
    assert len(versions) == 4
    for number, (mine, theirs) in enumerate(zip(versions, made.versions, strict=True)):
        unequal = np.flatnonzero(mine.view(np.int32) != theirs.view(np.int32))
        assert not len(unequal), (number, len(unequal), unequal[:4], ranks[0]["log"])
    for rank in ranks:
        assert np.array_equal(rank["last"].view(np.int32), last.view(np.int32))
        assert len(rank["versions"])  # evaluated a version: exactly that one, in all ranks
        for version, exact in zip(rank["versions"], rank["exact"], strict=True):
            assert np.array_equal(exact, made.versions[version])
    last_snapshot = max(step for step, kind, _ in ranks[0]["log"] if kind == "snapshot")
    assert tokens == 12 * last_snapshot


@pytest.mark.sweep
@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize(("ranks", "how"), [(4, "hsdp"), (2, "ddp")])
def test_replicas_are_one_model(node, ranks, how, machines):
    """The first replica copies out, and all copy in."""
    made = node(ranks, how, "sgd", does="", machines=machines)
    found, _ = trained(made, 60, 3)
    last, _ = replayed(found[0]["log"], found[0]["steps"], ranks, "sgd")
    for rank in found:
        assert np.array_equal(rank["last"], found[0]["last"])
    assert np.abs(found[0]["last"] - last).max() <= 1e-5 * np.abs(last).max()


@pytest.mark.sweep
def test_a_rank_that_is_killed_leaves_whole_deltas_and_the_base(node):
    """What was sent is whole; the ranks that come back begin at the base, to the bit."""
    made = node(2, "fsdp", "sgd", does="")
    made.begin()
    made.steps(20)
    _, delta = made.delta()
    made.merge(delta)
    made.processes[1].kill()
    made.until(lambda: made.said[-1].startswith("rank "))
    found, delta = made.delta()  # it is answered, with nothing in it
    assert (found.tokens, found.steps, delta) == (0, 0, None)
    for process in made.processes:
        process.wait(60)
    made.processes.clear()
    made.start(generation=1)
    made.until(lambda: made.said[-1] == "all 2 ranks are here" and not made.shell.has_work)
    before = made.shell.meter.steps
    made.steps(before + 5)
    found, delta = made.delta()
    assert found.base == 1
    made.merge(delta)
    ranks = made.end()
    step, _, version = ranks[0]["log"][0]
    assert (step, version) == (0, 1)
    steps_sent = max(step for step, kind, _ in ranks[0]["log"] if kind == "snapshot")
    assert found.tokens == 12 * steps_sent
    # The same steps from the same version, in one process.
    model = build()
    torch.nn.utils.vector_to_parameters(
        torch.from_numpy(made.versions[1].copy()), model.parameters()
    )
    optimizer = optimizer_of("sgd", model)
    for step in range(steps_sent):
        for rank in range(2):
            (loss_of(model, *part(step, rank, 2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    now = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    assert np.array_equal(made.versions[1] - now, delta)

"""Settings of runs whose clients send by themselves."""

import pytest

from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.errors import ConfigError

BUFFER = "sync.trigger=buffer"
LATEST = "outer.aggregation=latest"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["outer.optimizer=nesterov"], "moves a momentum of 0.9 with every 2 deltas of 3 clients"),
        (["outer.optimizer=nesterov"], r"diverges; choose average, or outer\.momentum <= 0\.5"),
        (["sync.dylu=true"], "set sync.local_steps"),
        (["sync.pace=own"], "which the built-in one does not"),
        (["sync.pace=own", "sync.local_steps=9"], "leave out one of them"),
        (["tune.method=lora", "tune.rule=bank"], "needs rounds"),
        ([LATEST, "outer.optimizer=nesterov", "outer.momentum=0.5"], "would add up each use"),
        ([LATEST, "sync.weighting=batch"], "choose auto: a client's newest delta"),
        ([LATEST, "sync.trigger=clock"], "again; choose buffer"),
        ([LATEST, "tune.method=lora"], "is for pretraining"),
    ],
)
def test_what_does_not_go_together(given, text):
    """One line says why, and what to choose."""
    with pytest.raises(ConfigError, match=text):
        with_implied(load(None, [BUFFER, *given]))


@pytest.mark.parametrize(
    "given",
    ["sync.buffer=2", "sync.least_s=1", "sync.local_steps=9", "sync.dylu=true", "sync.pace=own"],
)
def test_what_only_buffer_uses(given):
    """A setting that would do nothing is an error."""
    with pytest.raises(ConfigError, match=r"is for sync\.trigger = buffer"):
        with_implied(load(None, [given]))


@pytest.mark.parametrize(
    ("given", "optimizer"),
    [
        (["sync.clients=4"], "average"),
        (["sync.clients=4", "sync.buffer=4"], "growing"),
        (["sync.clients=4", "sync.buffer=4", LATEST], "average"),
        (["outer.optimizer=nesterov", "outer.momentum=0.5"], "nesterov"),
        (["outer.optimizer=nesterov", "sync.buffer=3"], "nesterov"),
    ],
)
def test_momentum_of_versions_of_a_few_clients(given, optimizer):
    """Growing momentum stands for none there; the others are as asked for."""
    assert with_implied(load(None, [BUFFER, *given])).outer.optimizer == optimizer


@pytest.mark.parametrize(
    ("given", "size", "staleness"),
    [
        ([], 2, 20),
        (["sync.clients=9"], 5, 20),
        (["sync.buffer=1", "sync.max_staleness=0"], 1, 0),
        (["sync.clients=1"], 2, 20),
    ],
)
def test_what_follows_from_the_number_of_clients(given, size, staleness):
    """Half of them make a version, and older deltas count than with calls."""
    sync = load(None, [BUFFER, *given]).sync
    assert (sync.buffer_size, sync.staleness_limit) == (size, staleness)
    assert load(None, []).sync.staleness_limit == 4

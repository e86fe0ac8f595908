"""The decisions of the methods, as a table, and that they are those of the mathematics."""

from typing import get_args

import pytest

from fsl_async.config import settings
from fsl_async.roles.split.methods import METHODS, SplitRules, decisions_of

TABLE = {
    #               free      lockstep  steps that upload    answer wait  replicas averaged
    "sl": ("sequential", "sequential", [0, 1, 2, 3, 4, 5, 6], True, True, False, ("client",)),
    "splitfed-v1": ("rounds", "turns", [0, 1, 2, 3, 4, 5, 6], True, True, True, ("client",)),
    "splitfed-v2": ("rounds", "turns", [0, 1, 2, 3, 4, 5, 6], True, False, False, ("client",)),
    "cse-fsl": ("rounds", "turns", [0, 3, 6], False, False, False, ("client", "auxiliary")),
    "fsl-sage": ("rounds", "turns", [0, 3, 6], False, False, False, ("client",)),
    "fedavg": ("rounds", "turns", [], False, False, False, ("client",)),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_table(name):
    """What each method does, in one place."""
    free = decisions_of(SplitRules(method=name, upload_every=3, align_every=4))
    lock = decisions_of(SplitRules(method=name, lockstep=True))
    steps = [step for step in range(7) if free.uploads_at(step)]
    row = (free.trigger, lock.trigger, steps, free.gradients, free.waits_at_round_end)
    assert (*row, free.replicas, free.averaged) == TABLE[name]
    assert lock.waits_at_round_end == lock.has_server
    assert (free.in_flight, lock.in_flight) == (2, 1)
    assert free.max_stale_rounds == (0 if name == "splitfed-v1" else 1)
    aligns = [number for number in range(9) if free.aligns_in(number)]
    assert aligns == ([0, 4, 8] if name == "fsl-sage" else [])
    assert (free.waits_for_alignment(), lock.waits_for_alignment()) == (False, name == "fsl-sage")
    assert {free.trigger, lock.trigger} <= set(get_args(settings.Trigger))


def test_the_u_shape():
    """Two legs a step, where an answer comes at all, and one step at a time."""
    home = {name: decisions_of(SplitRules(method=name, labels_at_home=True)) for name in METHODS}
    assert [name for name, one in home.items() if one.legs == 2] == [
        "sl",
        "splitfed-v1",
        "splitfed-v2",
    ]
    assert home["sl"].in_flight == 1


def test_an_unknown_method():
    """The configuration names those that exist."""
    with pytest.raises(KeyError):
        decisions_of(SplitRules(method="other"))


def test_they_are_those_of_the_mathematics():
    """One run, two files a method: what they say twice must be the same."""
    from fsl_async.learn.split.methods import METHODS as MATHEMATICS

    assert set(METHODS) == set(MATHEMATICS)
    for name, decisions in METHODS.items():
        method = MATHEMATICS[name]
        assert decisions.has_server == method.has_server
        assert decisions.replicas == method.replicas
        assert decisions.aligned == (method.auxiliary == "aligned")
        assert ("auxiliary" in decisions.averaged) == (method.auxiliary == "trained")
        sequential = decisions_of(SplitRules(method=name)).trigger == "sequential"
        assert sequential == method.relay
        averaged = () if sequential else decisions.averaged
        assert averaged == method.averaged

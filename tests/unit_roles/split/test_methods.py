"""The decisions of the methods, as a table, and what follows from the registry."""

from typing import get_args, get_type_hints

import pytest
from click import Context

from fsl_async.commands import compare, demo, plan, sim
from fsl_async.config import settings, settings_training
from fsl_async.config.settings_training import SplitConfig
from fsl_async.plan.methods import PLANNED
from fsl_async.roles.split.methods import METHODS, method_of

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
    free = method_of(SplitConfig(method=name, upload_every=3, align_every=4))
    lock = method_of(SplitConfig(method=name, mode="lockstep"))
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


def test_whatever_offers_methods_offers_all_of_the_registry():
    """A new method is one file and one line: settings, planner, options of commands follow."""
    assert get_args(get_type_hints(settings_training.SplitConfig)["method"]) == ("none", *METHODS)
    assert set(METHODS) <= set(PLANNED)
    straight = [name for name in PLANNED if not name.endswith("-u")]
    assert straight == list(METHODS)
    cut = [name for name, method in METHODS.items() if method.has_server]
    (choice,) = (each.type for each in demo.command.params if each.name == "method")
    assert list(choice.choices) == cut
    for command in (sim.command, compare.command, plan.command):
        shown = " ".join(command.get_help(Context(command)).split())
        assert all(name in shown for name in METHODS), command.name

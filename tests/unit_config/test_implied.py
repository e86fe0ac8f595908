"""What a private run implies, and which ones cannot be."""

import pytest

from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.errors import ConfigError

PRIVATE = ("tune.method=lora", "tune.dp_epsilon=6", "tune.rule=ffa", "run.rounds=9")


def test_a_private_run_is_by_rounds():
    """The budget is for rounds x steps; by the clock a site would make any number of steps."""
    made = with_implied(load(None, PRIVATE))
    assert (made.sync.trigger, made.sync.max_staleness) == ("rounds", 0)
    clock = "sync.trigger=clock"
    with pytest.raises(ConfigError, match=r"tune\.dp_epsilon needs rounds"):
        with_implied(load(None, [*PRIVATE, clock]))
    free = with_implied(load(None, [*PRIVATE[:1], *PRIVATE[2:], clock]))
    assert free.sync.trigger == "clock"


@pytest.mark.parametrize(
    ("sets", "trigger"),
    [
        ([], "clock"),
        (["sync.trigger=buffer"], "buffer"),
        (["tune.method=lora"], "rounds"),
        (["tune.method=lora", "sync.trigger=clock"], "clock"),
        (["split.method=sl"], "sequential"),
    ],
)
def test_the_kind_of_a_run_chooses_its_trigger(sets, trigger):
    assert with_implied(load(None, sets)).sync.trigger == trigger


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        (
            "tune.rule=fedit",
            "tune.rule",
            "choose ffa or fedsvd, .* noise on both is multiplied, got fedit",
        ),
        ("tune.rule=bank", "tune.rule", "got bank"),
        ("run.rounds=0", "run.rounds", "budget for all rounds of the run; set run.rounds"),
        ("tune.method=zeroth", "tune.method", "has no private training: choose lora"),
        ("tune.method=none", "tune.method", "has no private training: choose lora"),
        ("sync.trigger=sequential", "sync.trigger", "tune.dp_epsilon needs rounds"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(change, key, text):
    """At the parameter server, before any site has trained."""
    with pytest.raises(ConfigError, match=text) as caught:
        with_implied(load(None, [*PRIVATE, change]))
    assert caught.value.key == key

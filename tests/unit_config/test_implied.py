"""What a private run implies, and which ones cannot be."""

import pytest

from fsl_async.config.implied import with_implied
from fsl_async.config.load import load
from fsl_async.errors import ConfigError

PRIVATE = ("tune.method=lora", "tune.dp_epsilon=6", "tune.rule=ffa", "run.rounds=9")


def test_a_private_run_is_by_rounds():
    """The budget is for rounds x steps; by the clock a site would make any number of steps."""
    made = with_implied(load(None, PRIVATE))
    assert (made.sync.trigger, made.sync.max_staleness) == ("rounds", 0)
    free = with_implied(load(None, PRIVATE[:1] + PRIVATE[2:]))
    assert free.sync.trigger == "clock"


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        ("tune.rule=fedit", "tune.rule", "needs tune.rule = ffa or fedsvd, .* got fedit: noise on"),
        ("tune.rule=bank", "tune.rule", "got bank"),
        ("run.rounds=0", "run.rounds", "budget for all rounds of the run: set run.rounds"),
        ("tune.method=zeroth", "tune.dp_epsilon", "has no private training: choose lora"),
        ("tune.method=none", "tune.dp_epsilon", "has no private training: choose lora"),
        ("sync.trigger=sequential", "sync.trigger", "tune.dp_epsilon needs rounds"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(change, key, text):
    """At the parameter server, before any site has trained."""
    with pytest.raises(ConfigError, match=text) as caught:
        with_implied(load(None, [*PRIVATE, change]))
    assert caught.value.key == key

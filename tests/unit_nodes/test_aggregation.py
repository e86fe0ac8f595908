"""An aggregation rule that cannot work in a run is refused in one line before the start."""

import pytest

from fsl_async.config.load import load
from fsl_async.errors import ConfigError
from fsl_async.nodes.ps.aggregation import check_aggregation, rule_of, weighting_of
from fsl_async.roles.sync.weighting import BatchWeighting, TokensWeighting, UniformWeighting


def config(*overrides):
    return load(None, overrides)


@pytest.mark.parametrize(("overrides", "words"), [
    (["outer.aggregation=multi-krum"], "anything needs 5 clients, sync.clients is 3; have more"),
    (["outer.aggregation=trimmed", "outer.byzantine=2"], "needs 5 clients"),
    (["outer.aggregation=median", "outer.byzantine=2"], "needs 5 clients"),
    (["outer.aggregation=median", "sync.trigger=sequential"], "merges one at a time"),
    (["outer.aggregation=median", "split.method=fedavg"], "send full weights"),
    (["sync.weighting=batch", "split.method=fedavg"], "choose auto or tokens"),
    (["guard.clip_norm=1", "split.method=fedavg"], "send full weights"),
])  # fmt: skip
def test_refused_in_one_line(overrides, words):
    """The line names what to change."""
    with pytest.raises(ConfigError) as caught:
        check_aggregation(config(*overrides))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_valid_rules_are_accepted():
    """The default, and a robust rule with enough clients, which weighs clients equally."""
    check_aggregation(config())
    robust = config("outer.aggregation=multi-krum", "sync.clients=5")
    check_aggregation(robust)
    assert (rule_of(robust).name, rule_of(robust).least) == ("multi-krum", 5)
    assert isinstance(weighting_of(robust), UniformWeighting)
    assert isinstance(weighting_of(config()), BatchWeighting)
    assert isinstance(weighting_of(config("split.method=fedavg")), TokensWeighting)
    assert isinstance(weighting_of(config("sync.weighting=tokens")), TokensWeighting)

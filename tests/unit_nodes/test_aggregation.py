"""An aggregation rule that cannot work in a run is refused in one line before the start."""

import pytest

from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.errors import ConfigError
from fsl_async.nodes.ps.aggregation import check_aggregation, merging_of, rule_of, weighting_of
from fsl_async.nodes.ps.node import store_settings_of
from fsl_async.roles.sync.weighting import (
    BatchWeighting,
    LatestWeighting,
    TokensWeighting,
    UniformWeighting,
)
from fsl_async.store.rules.adapters import RULES


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
        check_aggregation(with_implied(config(*overrides)))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("override", "words"), [
    ("outer.aggregation=median", "choose mean"),
    ("sync.weighting=batch", "choose auto or tokens or uniform"),
    ("sync.weighting=fednova", "choose auto or tokens or uniform"),
])  # fmt: skip
def test_rules_that_merge_products_are_refused_in_one_line(override, words):
    """With what they cannot work with. A mean of factors can."""
    valid = ["tune.method=lora", "tune.rule=bank"]
    with_implied(config(*valid))
    with pytest.raises(ConfigError) as caught:
        with_implied(config(*valid, override))
    key = override.partition("=")[0]
    assert caught.value.message.startswith(f"{key}: tune.rule = bank merges products of factors")
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    with_implied(config(*valid, "tune.rule=fedit", override))


def test_adapters_are_merged_by_the_rule_of_the_run():
    """With its scale and seed; a run without adapters has none."""
    tuned = with_implied(
        config("tune.method=lora", "tune.rule=flora", "tune.scale=3", "run.seed=9")
    )
    check_aggregation(tuned)
    made = store_settings_of(tuned)
    assert isinstance(made.product_rule, RULES["flora"])
    assert (made.adapter_scale, made.adapter_seed, made.may_keep_mean) == (3.0, 9, False)
    assert isinstance(weighting_of(tuned), TokensWeighting)
    plain = store_settings_of(with_implied(config("tune.method=lora")))
    assert plain.adapters is not None
    assert plain.product_rule is None
    assert plain.may_keep_mean
    assert store_settings_of(config()).adapters is None


def test_valid_rules_are_accepted():
    """The default, and a robust rule with enough clients, which weighs clients equally."""
    check_aggregation(config())
    robust = config("outer.aggregation=multi-krum", "sync.clients=5")
    check_aggregation(robust)
    assert (rule_of(robust).name, rule_of(robust).least) == ("multi-krum", 5)
    assert isinstance(weighting_of(robust), UniformWeighting)
    latest = config("outer.aggregation=latest", "sync.trigger=buffer", "sync.max_staleness=9")
    check_aggregation(latest)
    assert isinstance(weighting_of(latest), LatestWeighting)
    assert store_settings_of(with_implied(latest)).reuse == 9
    assert merging_of(latest).reuses
    assert not merging_of(robust).reuses
    assert isinstance(weighting_of(config()), BatchWeighting)
    assert isinstance(weighting_of(config("split.method=fedavg")), TokensWeighting)
    assert isinstance(weighting_of(config("sync.weighting=tokens")), TokensWeighting)


def test_guards_fit_the_kind_of_deltas():
    """Full weights are not clipped, and products whole."""
    assert with_implied(config()).guard.clip_median == 1.5
    assert with_implied(config("split.method=fedavg")).guard.clip_median == 0.0
    tuned = with_implied(config("tune.method=lora", "tune.rule=bank"))
    assert merging_of(tuned).clips_values
    assert not merging_of(config()).clips_values

"""The table of recipes, its page, and what the kind of a run implies."""

from pathlib import Path

import pytest

from fsl_async.config.load import load, setting_choices, to_toml
from fsl_async.config.recipes import RECIPES, with_implied
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "ASYNCHRONOUS.md"
BUFFER, LATEST = "sync.trigger=buffer", "outer.aggregation=latest"
AIR = "outer.channel=air"
SECURE = ["tune.method=lora", "tune.secure=true"]
PRIVATE = ("tune.method=lora", "tune.dp_epsilon=6", "tune.rule=ffa", "run.rounds=9")


def recipe_table():
    rows = ["| a run of | may have |", "|---|---|"]
    for recipe in RECIPES:
        limits = []
        for key, only in recipe.settings.items():
            limits.append(f"`{key}` {only.shown}")
        rows.append(f"| {recipe.name} | {'; '.join(limits)} |")
    return rows


def test_the_page_has_the_table():
    """A user looks there before a run."""
    table = "\n".join(recipe_table())
    assert table in PAGE.read_text(), f"write it into {PAGE.name}:\n{table}"


def test_a_configuration_file_says_what_limits_a_setting():
    """Where one chooses a value, not only once it is refused."""
    lines = to_toml(Config()).splitlines()
    at = lines.index('aggregation = "mean"')
    assert "#     only mean where: sequential" in lines[at - 8 : at]


def test_rows_name_settings_and_values_that_there_are():
    """A row about a setting that was renamed would check nothing."""
    choices = setting_choices()
    for recipe in RECIPES:
        for key, only in recipe.settings.items():
            known = choices[key]
            assert not known or {str(one).lower() for one in only.values} <= {*known, "own"}, key


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["split.method=sl", "sync.trigger=clock"], "sync.trigger"),
        (["split.method=sl", "tune.method=lora"], "split.method"),
        (["model.family=resnet18"], "model.family"),
        ([f"model.tokenizer={'0' * 32}", "train.task=own"],
         "train.task.* built-in pretraining; leave out --tokenizer, got own"),
        (["tune.method=zeroth", "outer.optimizer=nesterov"], "outer.optimizer"),
        (["tune.method=lora", "tune.rule=rolora", "sync.trigger=clock"], "sync.trigger"),
        ([BUFFER, "outer.optimizer=nesterov"],
         r"outer.optimizer: moves .* 0.9 with every 2 deltas of 3 clients, .*momentum <= 0\.5"),
        ([BUFFER, "sync.pace=speed"], "sync.local_steps.* set sync.local_steps"),
        ([BUFFER, "sync.pace=own"], "train.task.* which the built-in one does not"),
        ([BUFFER, "sync.pace=own", "sync.local_steps=9"], "sync.local_steps.* leave out one"),
        ([BUFFER, "tune.method=lora", "tune.rule=bank"], "sync.trigger.* needs rounds"),
        ([BUFFER, LATEST, "outer.optimizer=nesterov", "outer.momentum=0.5"],
         "outer.optimizer.* would add up each use"),
        ([BUFFER, LATEST, "sync.weighting=batch"],
         "sync.weighting.* choose auto: a client's newest delta"),
        ([LATEST, "sync.trigger=clock"], "sync.trigger.* again; choose buffer"),
        ([BUFFER, LATEST, "tune.method=zeroth"], "tune.method.* choose lora, got zeroth"),
        ([BUFFER, LATEST, "tune.method=lora", "tune.rule=flexlora"], "sync.trigger.* needs rounds"),
        ([BUFFER, "tune.method=zeroth"],
         "sync.trigger.* needs rounds: scalars are of directions of one version; leave it out"),
        ([BUFFER, LATEST, "sync.weighting=arrivals"], "sync.weighting.* choose auto"),
        (["sync.buffer=2"], r"sync.buffer: is for sync\.trigger = buffer"),
        (["sync.local_steps=9"], r"sync.local_steps: is for sync\.trigger = buffer"),
        (["sync.pace=speed"], r"sync.pace: is for sync\.trigger = buffer"),
        (["sync.pace=own"], r"sync.pace: is for sync\.trigger = buffer"),
        ([*PRIVATE, "tune.rule=fedit"],
         "tune.rule.* choose ffa or fedsvd, .* noise on both is multiplied, got fedit"),
        ([*PRIVATE, "tune.rule=bank"], "tune.rule.* got bank"),
        ([*PRIVATE, "run.rounds=0"], "run.rounds.* all rounds of the run; set run.rounds"),
        ([*PRIVATE, "tune.method=zeroth"], "tune.method.* no private training: choose lora"),
        ([*PRIVATE, "tune.method=none"], "tune.method.* no private training: choose lora"),
        ([*PRIVATE, "sync.trigger=sequential"], "sync.trigger.* tune.dp_epsilon needs rounds"),
        ([*PRIVATE, "sync.trigger=clock"], "sync.trigger.* tune.dp_epsilon needs rounds"),
        (["tune.secure=true"], "tune.method.* choose lora or zeroth"),
        ([*SECURE, "tune.rule=flexlora"], "tune.rule.* sites alone; choose fedit, ffa, rolora"),
        ([*SECURE, "outer.aggregation=multi-krum"], "outer.aggregation.* alone; choose mean"),
        ([*SECURE, "sync.trigger=buffer"], "sync.trigger.* sites alone; leave it out"),
        ([*SECURE, "sync.trigger=clock"], "sync.trigger.* sites alone; leave it out"),
        ([*SECURE, "sync.clients=2"], "sync.clients.* have at least three, got 2"),
        ([*SECURE, "sync.weighting=tokens"], "sync.weighting.* sites count equally"),
        ([*SECURE, "guard.clip_median=4"], "guard.clip_median.* leave it out, got 4"),
        ([*SECURE, "guard.clip_norm=1"], "guard.clip_norm.* leave it out"),
        ([*SECURE, "guard.evaluator=judge"], "guard.evaluator.* leave it out, got judge"),
        ([*SECURE, "guard.outlier_median=9"], "guard.outlier_median.* leave it out"),
        ([AIR, "sync.trigger=clock"], "sync.trigger: outer.channel = air delivers the sum"),
        ([AIR, "outer.aggregation=median"], "outer.aggregation.* choose mean, got median"),
        ([AIR, "tune.method=lora", "tune.rule=fedex"], "tune.rule.* choose fedit, ffa, rolora"),
        ([AIR, *SECURE], "tune.secure.* leave out one of them"),
        ([AIR, "guard.evaluator=judge"], "guard.evaluator.* leave it out"),
        ([AIR, "split.method=sl", "sync.trigger=rounds"], "split.method.* leave out one of them"),
        ([AIR, "groups.roster=a=127.0.0.1:7100,b=127.0.0.1:7200"], "outer.channel.* remove groups"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named_by_its_key(given, text):
    """In one line, which says why and what to choose, before anything is created on disk."""
    with pytest.raises(ConfigError, match=f"^{text}") as caught:
        with_implied(load(None, given))
    assert text.startswith(caught.value.key)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("sets", "trigger"),
    [
        ([], "clock"),
        ([BUFFER], "buffer"),
        (["tune.method=lora"], "rounds"),
        (["tune.method=lora", "sync.trigger=clock"], "clock"),
        ([PRIVATE[0], *PRIVATE[2:], "sync.trigger=clock"], "clock"),
        (PRIVATE, "rounds"),
        (["split.method=sl"], "sequential"),
        ([AIR], "rounds"),
    ],
)
def test_the_kind_of_a_run_chooses_its_trigger(sets, trigger):
    """By rounds nothing is stale: by the clock a private site would make any number of steps."""
    made = with_implied(load(None, sets)).sync
    assert made.trigger == trigger
    assert (made.max_staleness == 0) is (sets == PRIVATE)


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


def test_secure_sums_weigh_sites_equally_and_clip_none():
    config = with_implied(load(None, SECURE))
    assert config.sync.weighting == "uniform"
    assert config.sync.trigger == "rounds"
    assert config.sync.staleness_limit == config.guard.clip_median == 0

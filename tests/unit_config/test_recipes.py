"""The table of recipes: its page, its keys, and that what it advises is allowed."""

from pathlib import Path

import pytest

from fsl_async.config.load import load, setting_choices, to_toml
from fsl_async.config.recipes import RECIPES, with_implied
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "ASYNCHRONOUS.md"


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
    ("given", "key"),
    [
        (["sync.trigger=buffer", "sync.least_s=700"], "sync.least_s"),
        (["sync.trigger=buffer", "sync.dylu=true", "sync.pace=own"], "sync.dylu"),
        (["split.method=sl", "sync.trigger=clock"], "sync.trigger"),
        (["split.method=sl", "tune.method=lora"], "split.method"),
        (["model.family=resnet18"], "model.family"),
        (["tune.method=zeroth", "outer.optimizer=nesterov"], "outer.optimizer"),
        (["tune.method=lora", "tune.rule=rolora", "sync.trigger=clock"], "sync.trigger"),
    ],
)
def test_what_does_not_go_together_is_named_by_its_key(given, key):
    """In one line, before anything is created on disk; other rows have tests of their own."""
    with pytest.raises(ConfigError, match=f"^{key}") as caught:
        with_implied(load(None, given))
    assert caught.value.key == key
    assert "\n" not in caught.value.message

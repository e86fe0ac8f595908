"""Settings that were given and have no effect are named, and no others."""

import shlex
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest

from fsl_async.config.load import load, setting_choices, to_toml
from fsl_async.config.settings import Config
from fsl_async.config.unused import RULES, line_of
from fsl_async.errors import ConfigError

ROOT = Path(__file__).parents[2]
LORA = "tune.method=lora"
CLOCK = "sync.trigger=clock"
BUFFER = "sync.trigger=buffer"
SL = "split.method=sl"
CNN = "model.family=small-cnn"


def named(*overrides):
    """Return the settings that the line names."""
    line = line_of(load(None, overrides), overrides)
    parts = line.removeprefix("without effect in this run: ").split("; ")
    return {part.partition(" ")[0] for part in parts if part}


@pytest.mark.parametrize(
    ("overrides", "unused"),
    [
        (["tune.steps=20"], {"tune.steps"}),
        ([LORA, "tune.steps=20"], set()),
        ([LORA, CLOCK, "tune.steps=20"], {"tune.steps"}),
        ([LORA, BUFFER, "tune.steps=9"], {"tune.steps"}),
        ([LORA, "sync.every_s=60", "sync.quorum=0.7"], {"sync.every_s", "sync.quorum"}),
        ([LORA, CLOCK, "sync.every_s=60", "sync.quorum=0.7"], set()),
        ([LORA, "sync.round_cap_s=60"], set()),
        (["sync.round_cap_s=60"], {"sync.round_cap_s"}),
        (["tune.method=zeroth", "tune.steps=9", "codec.up=bf16"], {"tune.steps", "codec.up"}),
        ([LORA, "tune.labels=a,b"], {"tune.labels"}),
        ([LORA, "tune.objective=classify", "tune.labels=a,b", "tune.trained_on=all"],
         {"tune.trained_on"}),
        ([LORA, "tune.dp_clip=2", "train.weight_decay=0.1"],
         {"tune.dp_clip", "train.weight_decay"}),
        ([LORA, "model.preset=10m", "data.shards=4"], {"model.preset", "data.shards"}),
        ([LORA, "tune.rule=bank", "sync.max_staleness=2"], {"sync.max_staleness"}),
        ([LORA, "tune.zo_rate=0.01"], set()),  # of sites with --order zeroth
        ([LORA, CLOCK, "tune.zo_rate=0.01"], {"tune.zo_rate"}),
        ([BUFFER, "sync.every_s=60", "sync.quorum=1"], {"sync.quorum"}),
        (["outer.learning_rate=0.5", "outer.momentum=0.8"], {"outer.learning_rate"}),
        (["outer.optimizer=average", "outer.momentum=0.8"], {"outer.momentum"}),
        (["outer.aggregation=median", "sync.weighting=tokens"], {"sync.weighting"}),
        (["outer.byzantine=2"], {"outer.byzantine"}),
        (["codec.up=bf16", "codec.up_step=1", "codec.down_step=1"], {"codec.up_step"}),
        (["codec.down=fp32", "codec.up_step=1", "codec.down_step=1"], {"codec.down_step"}),
        (["train.optimizer=adamw", "train.muon_rate=0.1"], {"train.muon_rate"}),
        # Growing momentum falls by it, too.
        (["train.schedule=cosine", "train.decay_share=0.2"], set()),
        (["train.schedule=cosine", "outer.optimizer=average", "train.decay_share=0.2"],
         {"train.decay_share"}),
        # AdamW's usual share of decay is another one than Muon's.
        ([LORA, "train.optimizer=adamw"], set()),
        ([LORA, "train.optimizer=adamw", "train.decay_share=0.2"], {"train.optimizer"}),
        ([SL, "train.optimizer=adamw"], {"train.optimizer"}),
        (["train.task=own", "model.preset=10m", "data.source=built-in"],
         {"model.preset", "data.source"}),
        (["split.samples=9"], {"split.samples"}),
        ([SL, "split.samples=9", "split.align_every=2", "outer.optimizer=average"],
         {"split.align_every", "outer.optimizer"}),
        (["split.method=fedavg", "split.cut=1"], {"split.cut"}),
        (["split.method=fsl-sage", "split.down=fp32", "split.align_every=2"], {"split.down"}),
        (["data.alpha=0.1"], {"data.alpha"}),
        ([SL, "data.partition=sorted", "data.alpha=0.1"], {"data.alpha"}),
        ([SL, "train.schedule=cosine", "train.decay_share=0.2"],
         {"train.schedule", "train.decay_share"}),
        ([SL, "split.schedule=wsd", "run.rounds=9", "train.decay_share=0.2"], set()),
        ([SL, "split.optimizer=sgd", "split.betas=0.9,0.9"], {"split.betas"}),
        (["split.method=cse-fsl", "split.optimizer=sgd", "split.betas=0.9,0.9"], set()),
        ([SL, "data.sharding=local", "data.partition=sorted"], {"data.partition"}),
        ([SL, CNN, "data.holdout=0.1", "model.context=64"], {"data.holdout", "model.context"}),
        ([SL, "data.holdout=0.1", "model.context=64"], set()),
        ([SL, "split.up=uniform", "codec.up_step=1", "codec.down_step=1"], {"codec.down_step"}),
        (["split.method=fedavg", "codec.up_step=1"], {"codec.up_step"}),
        (["split.method=fedavg", "split.models=uniform", "codec.up_step=1"], set()),
        (["train.schedule=cosine", "train.decay_share=0.2", "outer.optimizer=nesterov"],
         {"train.decay_share"}),
        (["split.method=cse-fsl", "split.align_rate=1"], {"split.align_rate"}),
        (["split.preset=published-fsl-sage"], set()),
        (["split.preset=published-fsl-sage", "split.align_every=0", "split.align_batch=9"],
         {"split.align_batch"}),
        (["guard.release=true"], {"guard.release"}),
        (["guard.max_share=0.5", "outer.aggregation=median", "sync.clients=3"],
         {"guard.max_share"}),
        (["guard.release=true", "guard.outlier_median=4"], set()),
        (["groups.every=3"], {"groups.every"}),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(overrides, unused):
    assert named(*overrides) == unused


def test_the_line_names_the_setting_and_the_condition():
    sets = [LORA, CLOCK, "tune.steps=30"]
    assert line_of(load(None, sets), sets) == (
        "without effect in this run: tune.steps (needs tune.method = lora with sync.trigger ="
        " rounds, or sync.pace = own)"
    )


def test_a_file_with_all_defaults_gives_nothing(tmp_path):
    """`init` writes such a file; a value changed in it counts."""
    path = tmp_path / "fsl.toml"
    path.write_text(to_toml(Config()))
    assert line_of(load(path), ()) == ""
    path.write_text(to_toml(load(None, ["tune.steps=30"])))
    assert "tune.steps" in line_of(load(path), ())


def test_each_rule_is_of_a_setting():
    for keys, _, _ in RULES:
        for pattern in keys.split():
            assert any(fnmatchcase(key, pattern) for key in setting_choices()), pattern


def recipes():
    """Return the settings of each start of a parameter or split server in the documentation."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages += sorted((ROOT / "docs" / "guides").glob("*.md"))
    for page in pages:
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if "bin/fsl-node --role ps" in line or "bin/fsl-node --role server" in line:
                words = shlex.split(line.partition(" #")[0].strip("|` "))
                sets = [word for before, word in pairwise(words) if before == "--set"]
                if "--base" in words and not any("tune.method" in one for one in sets):
                    sets.append(LORA)
                yield f"{page.name}: {' '.join(sets)}", sets


def test_each_recipe_of_the_documentation_sets_what_has_an_effect():
    found = dict(recipes())
    assert len(found) > 10
    for name, sets in found.items():
        try:
            assert named(*sets) == set(), name
        except ConfigError as error:
            raise AssertionError(name) from error

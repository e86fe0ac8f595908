"""Finds settings that were given and have no effect in a run of its kind. Pure.

`RULES` lists, for settings that matter in some runs only, the condition under which they do. A
setting without a rule matters in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import attrs

from fsl_async.config.presets import PUBLISHED
from fsl_async.config.recipes import with_implied
from fsl_async.config.settings import TABLES, CodecConfig, Config
from fsl_async.config.settings_training import SplitConfig
from fsl_async.config.settings_tuning import HEADS
from fsl_async.roles.split.methods import METHODS, Method

Condition = Callable[[Config], bool]


def _pretrains(config: Config) -> bool:
    return not config.split.is_on and not config.tune.is_on


def _split_has(which: Callable[[type[Method]], bool]) -> Condition:
    return lambda config: config.split.is_on and which(METHODS[config.split.method])


def _has_images(config: Config) -> bool:
    return config.model.family in {"resnet18", "small-cnn"}


def _split(config: Config) -> SplitConfig | CodecConfig:
    """Return the table with the number formats of what crosses the cut, where there is one."""
    return config.split if config.split.has_server else config.codec


def _schedule(config: Config) -> str:
    return config.split.schedule if config.split.is_on else config.train.schedule


def _by_scalars(config: Config) -> bool:
    return config.tune.method == "zeroth"


def _may_be_zeroth(config: Config) -> bool:
    """Whether sites may have --order zeroth."""
    tune = config.tune
    by_rounds = config.sync.trigger == "rounds"
    return by_rounds and not tune.is_private and (_by_scalars(config) or tune.rule != "hetlora")


RULES: tuple[tuple[str, str, Condition], ...] = (
    ("split.*", "split.method", lambda c: c.split.is_on),
    ("tune.*", "tune.method", lambda c: c.tune.is_on),
    ("tune.secure_bits", "tune.secure = true and tune.method = lora",
     lambda c: c.tune.secure and not _by_scalars(c)),
    ("groups.*", "groups.roster", lambda c: c.groups.is_on),
    # When deltas are collected.
    ("sync.every_s", "sync.trigger = clock or buffer",
     lambda c: c.sync.trigger in {"clock", "buffer"}),
    ("sync.round_cap_s", "sync.trigger = rounds",
     lambda c: c.sync.trigger not in {"clock", "buffer"}),
    ("sync.quorum", "sync.trigger = clock",
     lambda c: c.sync.trigger == "clock"),
    ("sync.weighting", "outer.aggregation = mean or latest",
     lambda c: c.outer.aggregation in {"mean", "latest"}),
    ("sync.max_staleness", "a tune.rule that takes stale deltas",
     lambda c: not (c.tune.is_on and c.tune.by_rounds)),
    ("guard.clip_median", "deltas that are changes, not full weights",
     lambda c: not c.split.sends_whole),
    ("guard.max_share", "outer.aggregation = mean, and not sync.trigger = buffer",
     lambda c: c.outer.aggregation == "mean" and c.sync.trigger != "buffer"),
    ("guard.evaluator_alone guard.evaluator_left_out guard.evaluator_grace_s", "guard.evaluator",
     lambda c: bool(c.guard.evaluator)),
    ("guard.release", "guard.outlier_median", lambda c: bool(c.guard.outlier_median)),
    # How they are merged.
    ("outer.optimizer", "no split.method: its clients are averaged", lambda c: not c.split.is_on),
    ("outer.learning_rate", "outer.optimizer = nesterov, or your own",
     lambda c: c.outer.optimizer not in {"growing", "average"}),
    ("outer.momentum", "outer.optimizer other than average",
     lambda c: c.outer.optimizer != "average"),
    ("outer.byzantine", "outer.aggregation = trimmed, median or multi-krum",
     lambda c: c.outer.aggregation not in {"mean", "latest"}),
    ("air.*", "outer.channel", lambda c: c.outer.channel != "none"),
    ("codec.up codec.down", "no split.method: split.models, split.up and split.down count",
     lambda c: not c.split.is_on),
    ("codec.up codec.up_step", "gradients: scalars are sent", lambda c: not _by_scalars(c)),
    ("codec.up_step", "the format uniform", lambda c: "uniform" in {c.codec.up, _split(c).up}),
    ("codec.down_step", "the format uniform",
     lambda c: "uniform" in {c.codec.down, _split(c).down}),
    ("exchange.buffers", "pretraining: buffers of a base are frozen, those of a cut model sent",
     _pretrains),
    # The data and the model of built-in tasks.
    ("data.source", "a built-in task of pretraining or split learning",
     lambda c: not c.tune.is_on and not c.train.task),
    ("data.sharding", "data that sites share: in fine-tuning each has its own",
     lambda c: not c.tune.is_on),
    ("data.shards", "data.sharding = disjoint",
     lambda c: c.data.sharding == "disjoint" and not c.tune.is_on),
    (("data.partition data.flip data.crop data.sample_shape data.classes data.fingerprint"),
     "split.method", lambda c: c.split.is_on),
    ("data.partition data.alpha", "data.sharding = disjoint",
     lambda c: c.data.sharding == "disjoint"),
    ("data.holdout", "text: data sets have a test part", lambda c: not _has_images(c)),
    ("data.alpha", "data.partition = dirichlet or dirichlet-equal",
     lambda c: c.data.partition.startswith("dirichlet")),
    ("model.*", "no tune.method: the base is the model", lambda c: not c.tune.is_on),
    ("model.*", "no train.task: its script makes the model",
     lambda c: c.split.is_on or not c.train.task),
    (("model.preset model.layers model.width model.heads model.context model.tokenizer"
      " model.vocabulary"),
     "a language model", lambda c: not _has_images(c)),
    ("model.sizes", "a family other than gpt", lambda c: c.model.family != "gpt"),
    # How clients train.
    # It decides the usual share of decay, also where adapters have AdamW all the same.
    ("train.optimizer", "pretraining, or a schedule wsd without train.decay_share",
     lambda c: _pretrains(c)
     or (c.tune.is_on and c.train.schedule == "wsd" and not c.train.decay_share)),
    ("train.muon_rate", "train.optimizer = muon in pretraining",
     lambda c: _pretrains(c) and c.train.optimizer == "muon"),
    ("train.learning_rate", "gradients: tune.zo_rate counts", lambda c: not _by_scalars(c)),
    ("train.weight_decay", "no tune.method: adapters have no decay", lambda c: not c.tune.is_on),
    ("train.schedule train.warmup_steps train.decay_at",
     "no split.method: split.schedule and split.warmup_steps count", lambda c: not c.split.is_on),
    ("train.schedule train.warmup_steps train.decay_*",
     "gradients: rates of zeroth order are constant", lambda c: not _by_scalars(c)),
    ("train.decay_share train.decay_at", "a schedule wsd, or outer.optimizer = growing",
     lambda c: _schedule(c) == "wsd" or c.outer.optimizer == "growing"),
    ("train.clip_norm", "pretraining, or tune.method = lora without tune.dp_epsilon",
     lambda c: _pretrains(c) or (c.tune.method == "lora" and not c.tune.is_private)),
    ("train.evaluate_share", "the built-in pretraining or fine-tuning",
     lambda c: not c.split.is_on and not c.train.task),
    # Split learning.
    ("split.auxiliary split.upload_every", "a method with an auxiliary model",
     _split_has(lambda method: method.auxiliary != "none")),
    ("split.align_* split.buffer_samples", "a method that aligns its auxiliary model",
     _split_has(lambda method: method.auxiliary == "aligned")),
    ("split.align_passes split.align_batch split.align_rate split.buffer_samples",
     "split.align_every > 0", lambda c: c.split.align_every > 0),
    ("split.betas", "an optimizer adamw or adam",
     lambda c: c.split.optimizer != "sgd" or METHODS[c.split.method].auxiliary == "trained"),
    ("split.down", "a method that sends gradients back",
     _split_has(lambda method: method.gradients)),
    (("split.cut split.mode split.lora_server split.server split.listen split.up"
      " split.alone_s split.in_flight"),
     "a method with a split server", _split_has(lambda method: method.has_server)),
    ("split.in_flight", "split.mode = free, without split.labels_at_home",
     lambda c: c.split.mode == "free" and not c.split.labels_at_home),
    ("split.lora_alpha", "split.lora_client or split.lora_server",
     lambda c: bool(c.split.lora_client or c.split.lora_server)),
    # Fine-tuning.
    ("tune.rule", "tune.method = lora", lambda c: c.tune.method == "lora"),
    ("tune.labels tune.balance", "tune.objective = classify",
     lambda c: c.tune.objective == "classify"),
    ("tune.trained_on", "tune.objective = lm", lambda c: c.tune.objective == "lm"),
    ("tune.beta", "tune.objective = dpo, kto, simpo or orpo",
     lambda c: c.tune.objective in {"dpo", "kto", "simpo", "orpo"}),
    ("tune.gamma", "tune.objective = simpo", lambda c: c.tune.objective == "simpo"),
    ("tune.group tune.same_rewards tune.answer_tokens tune.kl tune.kl_limit",
     "tune.objective = grpo",
     lambda c: c.tune.objective == "grpo"),
    ("tune.head", "tune.objective = classify or reward", lambda c: c.tune.objective in HEADS),
    ("tune.steps", "tune.method = lora with sync.trigger = rounds, or sync.pace = own",
     lambda c: c.tune.method == "lora" and (c.sync.trigger == "rounds" or c.sync.pace == "own")),
    ("tune.zo_*", "rounds in which sites may have --order zeroth", _may_be_zeroth),
    ("tune.zo_history", "tune.method = zeroth", _by_scalars),
    ("tune.dp_delta tune.dp_clip", "tune.dp_epsilon", lambda c: c.tune.is_private),
)  # fmt: skip
"""Keys of settings, with * for any characters; what they need, in words; and that condition."""

_DECIDES = {"split.method", "tune.method", "groups.roster"}
"""Settings that choose the kind of a run."""


def line_of(config: Config, overrides: Iterable[str]) -> str:
    """Name the given settings without effect, in one line; empty where there are none.

    config: as read. overrides: "table.key=value". A file that `init` has written holds all
    settings, so that one with its default does not count as given; nor does one that `split.preset`
    sets. Raises ConfigError as `with_implied` does.
    """
    given = dict.fromkeys(text.partition("=")[0].strip() for text in overrides)
    preset = PUBLISHED.get(config.split.preset, {})
    for table, kind in TABLES.items():
        for field in attrs.fields(kind):
            key = f"{table}.{field.name}"
            value = getattr(getattr(config, table), field.name)
            if value not in (field.default, preset.get(key)):
                given.setdefault(key)
    made, found = with_implied(config), []
    for key in [one for one in given if one not in _DECIDES]:
        for keys, needs, holds in RULES:
            if any(fnmatchcase(key, one) for one in keys.split()) and not holds(made):
                found.append(f"{key} (needs {needs})")
                break
    return f"without effect in this run: {'; '.join(found)}" if found else ""

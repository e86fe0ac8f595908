"""Sizes of a run's adapters, from the shapes of its base. No torch."""

import fnmatch
from math import prod

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError
from fsl_async.learn.tune.base_files import BaseFacts, Linear

# Classification heads that transformers adds, by `model_type`; those of decoders have no bias.
_ONE_LAYER = frozenset({"bert", "albert", "mpnet", "deberta", "deberta-v2"})
_TWO_LAYERS = frozenset({"roberta", "xlm-roberta", "camembert", "electra", "distilbert"})


def adapted_layers(facts: BaseFacts, tune: TuneConfig) -> tuple[Linear, ...]:
    """The linear layers that get adapters. Raises ConfigError where there is none."""
    targets = [name for name in tune.targets.split(",") if name]
    if targets == ["none"]:
        return ()
    whole = {name.rpartition(".")[0] for name in _full_names(facts, tune)}
    found = tuple(
        layer
        for layer in facts.linear
        if not layer.is_head and layer.name not in whole
        if not targets or layer.name.rpartition(".")[2] in targets
    )
    if not found:
        raise ConfigError(
            f"tune.targets: the base has no linear layer {tune.targets or 'but heads'}",
            "tune.targets",
        )
    return found


def full_values(facts: BaseFacts, tune: TuneConfig) -> int:
    """Values of weights that train whole, with those of a new classification head."""
    found = sum(prod(facts.shapes[name]) for name in _full_names(facts, tune))
    if tune.objective == "classify":
        found += _head_values(facts, len(tune.label_names))
    return found


def _head_values(facts: BaseFacts, classes: int) -> int:
    config = facts.config
    kind = str(config.get("model_type"))
    width = int(
        next((config[name] for name in ("hidden_size", "n_embd", "dim") if name in config), 0)
    )
    if kind in _TWO_LAYERS:
        return (width + 1) * (width + classes)
    return (width + (kind in _ONE_LAYER)) * classes


def _full_names(facts: BaseFacts, tune: TuneConfig) -> list[str]:
    patterns = [name for name in tune.full.split(",") if name]
    return [
        name for name in facts.shapes if any(fnmatch.fnmatchcase(name, one) for one in patterns)
    ]

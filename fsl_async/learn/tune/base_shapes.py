"""Sizes of a run's adapters, from the shapes of its base. No torch."""

import fnmatch
from collections.abc import Mapping, Sequence
from math import prod

import attrs

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError
from fsl_async.learn.models import targets
from fsl_async.learn.models.targets import is_head
from fsl_async.learn.tune.base_files import BaseFacts, Linear

_TWO = ("classifier.dense", "classifier.out_proj")
_CLASSIFIERS: Mapping[str, Sequence[str]] = {
    "bert": ("bert.pooler.dense", "classifier"), "albert": ("albert.pooler", "classifier"),
    "roberta": _TWO, "xlm-roberta": _TWO, "camembert": _TWO, "electra": _TWO, "mpnet": _TWO,
    "distilbert": ("pre_classifier", "classifier"), "deberta": ("pooler.dense", "classifier"),
    "deberta-v2": ("pooler.dense", "classifier"),
    "bart": ("classification_head.dense", "classification_head.out_proj"),
}  # fmt: skip
"""The layers of a classifier, by `model_type`: as wide as the model, but for the last one, which
has an output for each label. Decoders have one without a bias, called score."""


@attrs.frozen
class Planned:
    """The tensors that a client exchanges, counted from the files of its base."""

    layers: tuple[Linear, ...]
    """Layers that get adapters."""
    full: int
    """Values of weights that train whole."""
    left_out: str
    """A line about matrices that get no adapter, or ""."""


def planned(facts: BaseFacts, tune: TuneConfig) -> Planned:
    """Choose the layers that get adapters, and count the weights that train whole.

    Raises ConfigError for targets and names of full weights that the base does not have.
    """
    head = _head_shapes(facts, tune)
    model = attrs.evolve(facts, shapes=_loaded_shapes(facts, tune) | head)
    whole = [*head, *_full_names(model, tune, head)]
    wanted = [name for name in tune.targets.split(",") if name]
    linear = {layer.name: layer for layer in model.linear}
    names = targets.adapted_layers(
        linear, facts.shapes, trunk=facts.trunk, targets=wanted, whole=whole
    )
    left_out = targets.without_adapters(
        model.shapes, trunk=facts.trunk, adapted=names, targets=wanted, whole=whole
    )
    full = sum(prod(model.shapes[name]) for name in whole)
    return Planned(tuple(linear[name] for name in names), full, left_out)


def _head_shapes(facts: BaseFacts, tune: TuneConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a classifier that train whole: outside the trunk, or not on file."""
    if tune.objective != "classify":
        return {}
    config = facts.config
    named = (config[name] for name in ("hidden_size", "n_embd", "dim", "d_model") if name in config)
    width = int(next(named, 0))
    kind = str(config.get("model_type"))
    layers = _CLASSIFIERS.get(kind, ("score",))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        outputs = len(tune.label_names) if layer == layers[-1] else width
        if is_head(layer, facts.trunk) or f"{layer}.weight" not in facts.shapes:
            shapes[f"{layer}.weight"] = (outputs, width)
            if kind in _CLASSIFIERS:
                shapes[f"{layer}.bias"] = (outputs,)
    return shapes


def _loaded_shapes(facts: BaseFacts, tune: TuneConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of what the client's model takes from the files."""
    if tune.objective != "classify":
        return dict(facts.shapes)
    has_pooler = facts.config.get("model_type") in {"bert", "albert"}
    return {
        name: shape
        for name, shape in facts.shapes.items()
        if not is_head(name, facts.trunk)
        if has_pooler or not name.startswith(f"{facts.trunk}.pooler.")
    }


def _full_names(model: BaseFacts, tune: TuneConfig, head: Mapping[str, object]) -> list[str]:
    """Names of the weights that tune.full names, without the head's."""
    found: dict[str, None] = {}
    for pattern in filter(None, tune.full.split(",")):
        matched = fnmatch.filter(model.shapes, pattern)
        if not matched:
            raise ConfigError(f"tune.full: no weight of the base matches {pattern}", "tune.full")
        found |= dict.fromkeys(name for name in matched if name not in head)
    return list(found)

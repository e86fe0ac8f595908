"""Finds the heads of a base model, and its layers that share their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsl_async.learn.models.hf import has_marks
from fsl_async.learn.models.targets import HEADS, is_head

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

_LANGUAGE_HEADS = frozenset({"lm_head", "embed_out"})


def trunk_of(model: nn.Module) -> str:
    """Return the name of the module that all models of the family share, or "".

    That is `base_model_prefix` of transformers. A module of your own around one transformers model
    has that one as its trunk.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        return str(prefix)
    found = [name for name, part in model.named_children() if hasattr(part, "base_model_prefix")]
    return found[0] if len(found) == 1 else ""


def heads_of(model: nn.Module) -> list[str]:
    """Return the names of the weights of new heads, in the model's order. They train whole.

    That is what is outside the trunk, but for the head of a language model, which was pretrained
    with it; and what the files lacked from which transformers (5 and newer) has loaded the model.
    What a loader reports as missing is added by the caller (`Adapters(heads=...)`).
    """
    trunk = trunk_of(model)
    weights = dict(model.named_parameters())
    names, outputs = list(weights), _language_head(model)
    if trunk:
        found = set() if outputs is not None else {n for n in names if is_head(n, trunk)}
    else:
        heads = HEADS - _LANGUAGE_HEADS
        found = {name for name in names if not heads.isdisjoint(name.split("."))}
    # One of another size, after resize_token_embeddings, has lost its mark.
    found |= {name for name in _not_loaded(model) if weights[name] is not outputs}
    return [name for name in names if name in found]


def tied_layers(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """Return the layers whose weight another name holds too, and that name."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight.data_ptr() or id(weight), []).append(name)
    tied = {}
    for layer in layers:
        own: Any = model.get_submodule(layer).weight
        others = [one for one in names[own.data_ptr() or id(own)] if one != f"{layer}.weight"]
        if others:
            tied[layer] = others[0]
    return tied


def _language_head(model: Any) -> Tensor | None:
    """The weight of the output layer, where the outputs are the tokens of the input embeddings."""
    try:
        layers = model.get_output_embeddings(), model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    outputs, inputs = (getattr(one, "weight", None) for one in layers)
    is_same = outputs is not None and inputs is not None and len(outputs) == len(inputs)
    return outputs if is_same else None


def _not_loaded(model: nn.Module) -> set[str]:
    """Names of weights that transformers has drawn because no file had them."""
    marks = {
        name: hasattr(weight, "_is_hf_initialized")
        for name, weight in model.named_parameters()
        if weight.is_floating_point()
    }
    # Without any mark the model was built from a config, or in another way.
    if not (has_marks() and any(marks.values())):
        return set()
    return {name for name, is_loaded in marks.items() if not is_loaded}

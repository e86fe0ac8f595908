"""Chooses the layers of a base that get adapters, by the names of its weights. No torch.

The planner has names from files, a client from the loaded model; both choose here, so they agree.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from fsl_async.errors import ConfigError

HEADS = frozenset({"lm_head", "embed_out", "score", "classifier", "head"})
"""Names of output layers, of models that do not tell where their trunk is."""

_EXPERTS = ".experts."
_EMBEDDING = re.compile(
    r"(^|[._])(embed(_\w+)?|embeddings?|wte|wpe|shared|relative_attention_bias)(\.|$)"
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def is_head(name: str, trunk: str) -> bool:
    """Whether a layer or weight is outside the trunk; with no trunk, whether its name is a head's.

    trunk: name of the module that all models of a family share, such as "model" or "bert".
    """
    if trunk:
        return not name.startswith(f"{trunk}.")
    return not HEADS.isdisjoint(name.split("."))


def is_embedding(name: str) -> bool:
    """Whether a module's name is that of an embedding, or of a part of one."""
    return bool(_EMBEDDING.search(name))


def adapted_layers(
    linear: Iterable[str],
    weights: Iterable[str],
    *,
    trunk: str,
    targets: Sequence[str],
    whole: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the names of the linear layers that get adapters, in the order of `linear`.

    weights: names of all weights. targets: last names of layers; none: all that can have adapters;
    "none": no layer. whole: names of weights that train whole. tied: layers that share their
    weight, and with which weight.

    Heads, tied layers, experts and their routers cannot: a merged adapter of a tied layer would
    change the other layer too, and transformers 5 holds the experts of a block in one weight.

    Raises ConfigError for a target that no layer has, or that none with an adapter can have.
    """
    if list(targets) == ["none"]:
        return []
    # In the module that holds the experts, a layer beside them decides which of them compute.
    mixtures = {name.partition(_EXPERTS)[0] for name in weights if _EXPERTS in name}
    full = {name.rpartition(".")[0] for name in whole}
    found: list[str] = []
    barred: dict[str, str] = {}
    for name in linear:
        parent, _, last = name.rpartition(".")
        reasons = (
            (name in (tied or ()), f"it shares its weight with {(tied or {}).get(name)}"),
            (name in full, "it trains whole"),
            (is_head(name, trunk), "it is a head: tune.full can name it"),
            (_EXPERTS in f"{name}.", "it is an expert"),
            (parent in mixtures, "it chooses experts"),
        )
        reason = next((text for is_so, text in reasons if is_so), "")
        if reason:
            barred.setdefault(last, f"{name} cannot have an adapter: {reason}")
        else:
            found.append(name)
    known = sorted({name.rpartition(".")[2] for name in found})
    for target in targets:
        if target not in known:
            what = barred.get(target, f"the base has no linear layer {target}")
            raise ConfigError(
                f"tune.targets: {what}; layers that can have one: {', '.join(known)}",
                "tune.targets",
            )
    chosen = [name for name in found if not targets or name.rpartition(".")[2] in targets]
    if not chosen:
        raise ConfigError("LoRA finds no linear layer in this base", "tune.targets")
    return chosen


def without_adapters(
    shapes: Mapping[str, Sequence[int]],
    *,
    trunk: str,
    adapted: Iterable[str],
    targets: Sequence[str] = (),
    whole: Iterable[str] = (),
) -> str:
    """Return one line about the trunk's matrices that get no adapter; "" where all have one.

    shapes: of all weights by name. Named are those that `targets` asks for. Embeddings are left
    out; numbers of blocks and experts become `*`.
    """
    known = {f"{name}.weight" for name in adapted} | set(whole)
    found: dict[str, None] = {}
    for name, shape in shapes.items():
        if len(shape) < 2 or name in known or is_head(name, trunk) or is_embedding(name):
            continue
        if not targets or not set(targets).isdisjoint(name.split(".")):
            found[_NUMBER.sub("*", name.removesuffix(".weight"))] = None
    if not found:
        return ""
    names = ", ".join(found)
    return f"no adapters on {names}: they are experts, choose experts, or are no linear layers"

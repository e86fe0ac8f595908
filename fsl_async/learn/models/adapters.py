"""Adapters of low rank in a base model (LoRA, Hu et al., arXiv:2106.09685), by `peft`.

A linear layer with weight W (out, in) computes W x + scale B A x, with A (R, in) and B (out, R).
The base is frozen; A, B and the modules named by `full` train and are exchanged. R and `scale` are
the same at all sites. A site of rank r < R trains the first r rows of A and columns of B, as the
adapter `SITE`; the others are the frozen adapter `TAIL`, which the forward pass includes or not, by
the rule that merges (fsl_async.store.rules.adapters). Layout of the exchanged vector: for each
layer, in the order of the model,

    <layer>.lora_A   (R, in)
    <layer>.lora_B   (R, out), B transposed, so that a site's rows come first in both

then the full modules by their names. At first A is uniform with variance 1 / (3 in), drawn from the
run's seed and the layer's name, and B is zero, so the model's outputs are those of the base.

`apply_lora` does the same to a part of a cut model. Weights that are frozen never cross the wire
and are not in checkpoints: every site must have the same ones, from the same seed or files.

A script may bring adapters of its own (peft). `adapter_settings` has what their tensors do not
show, such as `lora_alpha`: two clients whose adapters have the same names and shapes and another
alpha compute different functions from the same weights. These settings are part of the manifest, so
the parameter server refuses the second one. The run's own adapters have none: their scale is the
run's.
"""

import fnmatch
import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError, TaskError, one_line
from fsl_async.learn.data.counter import first_a
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.models.hf import dequantize_whole, extra, has_marks, inject_adapters, sizes_of
from fsl_async.learn.models.targets import HEADS, adapted_layers, is_head, without_adapters
from fsl_async.store.model.frozen_tensors import FrozenTensor, setting
from fsl_async.store.rules.adapters.base import AdapterRule


@frozen
class Exchanged:
    """A tensor of the manifest: tensors of the module, joined along their first dimension.

    parts: their names. is_transposed: their transposes are joined.
    """

    name: str
    parts: tuple[str, ...]
    is_transposed: bool = False


@frozen
class View:
    """The exchanged tensors, in flat order.

    checks_frozen: whether the values of all others must be the same at all clients.
    """

    tensors: tuple[Exchanged, ...]
    checks_frozen: bool = True


_FIELDS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "rank_pattern",
    "alpha_pattern", "modules_to_save",
)  # fmt: skip
"""Fields of a peft config that are compared. Dropout and initialization may differ."""


def adapter_settings(module: nn.Module, exchanged: Collection[str]) -> tuple[FrozenTensor, ...]:
    """Return the settings of the adapters of which a tensor is exchanged, by name.

    exchanged: names of tensors. Which layers have adapters is among them, as `target_modules`.
    """
    configs: Mapping[str, Any] = next(
        (found for part in module.modules() if (found := getattr(part, "peft_config", None))), {}
    )
    return tuple(
        setting(f"adapter {name}: {field}", text)
        for name, config in configs.items()
        if any(f".{name}." in f"{tensor}." for tensor in exchanged)
        for field, text in _settings(config, exchanged)
    )


def _settings(config: Any, exchanged: Collection[str]) -> Iterator[tuple[str, str]]:
    for field in _FIELDS:
        if hasattr(config, field):
            yield field, _text(getattr(config, field))
    layers = {one.partition(".lora_")[0] for one in exchanged if ".lora_" in one}
    yield "target_modules", _text({layer.rpartition(".")[2] for layer in layers})


def _text(value: Any) -> str:
    """A value as one line: equal values have equal texts, whatever collection holds them."""
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(one)}" for key, one in sorted(value.items())) or "none"
    if isinstance(value, set | list | tuple):
        return ", ".join(sorted(map(str, value))) or "none"
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


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


def apply_lora(
    module: nn.Module, *, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0, seed: int = 0
) -> list[str]:
    """Freeze `module` and add adapters in place, before any optimizer is made.

    Returns the names of what trains now.

    All linear layers get adapters, but for heads and tied layers. The second factor starts at zero,
    so the outputs do not change. Raises ConfigError: no `peft`, or nothing to adapt.
    """
    layers = linear_layers(module)
    barred, trunk = tied_layers(module, layers), trunk_of(module)
    found = [name for name in layers if name not in barred and not is_head(name, trunk)]
    if not found:
        raise ConfigError("LoRA finds no linear layers in this part", "split.lora")
    with drawing(torch.device("cpu"), seed, "lora"):
        inject(module, found, rank=rank, alpha=alpha, dropout=dropout, key="split.lora")
    return [name for name, weight in module.named_parameters() if weight.requires_grad]


def inject(
    module: nn.Module,
    layers: Sequence[str],
    *,
    rank: int,
    alpha: float,
    key: str,
    dropout: float = 0.0,
    name: str = "default",
) -> None:
    """Have peft put the adapters `name` into linear layers, in place, and freeze all others.

    alpha: rank times the scale of the product. Raises ConfigError about the setting `key`.
    """
    config = extra("peft").LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(layers),
        # GPT-2 keeps its linear layers transposed, as Conv1D; peft would warn and set this by
        # itself
        fan_in_fan_out=any(type(part).__name__ == "Conv1D" for part in module.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            inject_adapters(config, module, adapter_name=name)
    except ValueError as error:
        raise ConfigError(f"LoRA: {one_line(str(error))}", key) from error


def linear_layers(module: nn.Module) -> list[str]:
    """Full names of linear layers, heads too."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    ]


SITE, TAIL = "site", "tail"
"""Names of the two adapters in peft's layers."""

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


class Adapters:
    """The adapters of `model`, which is changed in place and frozen but for them.

    tune: the run's; seed: of the run. heads: names of weights that train whole beside tune.full and
    `heads_of` the model. site_rank: None for the run's. layers: numbers of the blocks whose
    adapters train at this site, like "0-2,5"; empty: all.

    Raises ConfigError in one line: no peft, no layer to adapt, a name that no weight has.
    """

    def __init__(
        self,
        model: nn.Module,
        tune: TuneConfig,
        rule: AdapterRule,
        *,
        seed: int,
        heads: Sequence[str] = (),
        site_rank: int | None = None,
        layers: str = "",
    ) -> None:
        self.model, self.rule, self.scale, self._seed = model, rule, tune.scale, seed
        self.rank = tune.adapter_rank
        self.site_rank = self.rank if site_rank is None else site_rank
        self._checks_base = tune.base_check == "values"
        tail = self.rank - self.site_rank
        asked = [name for name in tune.targets.split(",") if name]
        model.requires_grad_(False)
        self.full = _full_names(model, [name for name in tune.full.split(",") if name], heads)
        """Names of the weights that train whole."""
        self.at_home = [*heads_of(model), *heads] if tune.has_own_head else []
        """Those of them that are not exchanged: the head of a site that keeps its own."""
        dequantize_whole(model, self.full)
        to_fp32(model, self.full)
        linear = linear_layers(model)
        trunk, shapes = trunk_of(model), {n: w.shape for n, w in model.named_parameters()}
        targets = adapted_layers(
            linear,
            shapes,
            trunk=trunk,
            targets=asked,
            whole=self.full,
            tied=tied_layers(model, linear),
        )
        self.left_out = without_adapters(
            shapes, trunk=trunk, adapted=targets, targets=asked, whole=self.full
        )
        """A line about matrices that get no adapter, or ""."""
        if not targets and not set(self.full) - set(self.at_home):
            raise ConfigError(
                "tune.targets = none leaves nothing to exchange: name weights by tune.full",
                "tune.full",
            )
        for name, rank in ((SITE, self.site_rank), (TAIL, tail)):
            if targets and rank:
                alpha = self.scale * rank
                inject(model, targets, name=name, rank=rank, alpha=alpha, key="tune.targets")
        self.layers: dict[str, Any] = {name: model.get_submodule(name) for name in targets}
        """The adapted layers, of peft, by their names in the base."""
        for name, layer in self.layers.items():
            layer.set_adapter([SITE, TAIL] if tail and rule.keeps_tail else SITE)
            if rule.has_patch:
                layer.base_layer = Patched(layer.base_layer)
            self._start(name, layer)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in self.full)
        self._trains_here = {name for name in self.layers if not layers or _in_blocks(name, layers)}
        if targets and not self._trains_here:
            raise ConfigError(f"--layers {layers}: no adapted layer is in these blocks")
        self.begin_version(0)

    @property
    def view(self) -> View:
        """The tensors that are exchanged."""
        names = [SITE, TAIL] if self.rank > self.site_rank else [SITE]
        found = []
        for layer in self.layers:
            if self.rule.exchanges_a:
                parts = tuple(f"{layer}.lora_A.{name}.weight" for name in names)
                found.append(Exchanged(f"{layer}.lora_A", parts))
            parts = tuple(f"{layer}.lora_B.{name}.weight" for name in names)
            found.append(Exchanged(f"{layer}.lora_B", parts, is_transposed=True))
            if self.rule.has_patch:
                found.append(Exchanged(f"{layer}.patch", (f"{layer}.base_layer.patch",)))
        at_home = set(self.at_home)
        found += [Exchanged(name, (name,)) for name in self.full if name not in at_home]
        return View(tuple(found), self._checks_base)

    def begin_version(self, version: int) -> None:
        """Train what the rule trains from `version` on."""
        trains = {"lora_A": self.rule.trains_a(version), "lora_B": self.rule.trains_b(version)}
        for name, layer in self.layers.items():
            for factor, does in trains.items():
                weight = getattr(layer, factor)[SITE].weight
                weight.requires_grad_(does and name in self._trains_here)
                weight.grad = None

    def trained(self) -> list[nn.Parameter]:
        """All weights that train at this site in some version."""
        ever_a = any(self.rule.trains_a(version) for version in (0, 1))
        found = [
            getattr(self.layers[name], factor)[SITE].weight
            for name in self.layers
            if name in self._trains_here
            for factor, does in (("lora_A", ever_a), ("lora_B", True))
            if does
        ]
        return found + [self.model.get_parameter(name) for name in self.full]

    def _start(self, name: str, layer: Any) -> None:
        """Set the weights that adapters begin with."""
        names = [SITE, TAIL] if TAIL in layer.lora_A else [SITE]
        factors: list[Tensor] = [layer.lora_A[one].weight for one in names]
        start = torch.from_numpy(first_a(self._seed, name, self.rank, factors[0].shape[1]))
        with torch.no_grad():
            done = 0
            for weight in factors:
                rows = start[done : done + len(weight)]
                weight.data = rows.to(weight.device, torch.float32).clone()
                done += len(weight)
            for one in names:
                weight = layer.lora_B[one].weight
                weight.data = torch.zeros_like(weight, dtype=torch.float32)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Temporarily disable the adapters that peft put into `model`.

    What trains is the same afterwards: peft itself would make both factors of every adapter train.
    Weights that train whole (tune.full) stay as they are.
    """
    kind = extra("peft.tuners.tuners_utils").BaseTunerLayer
    layers: list[Any] = [part for part in model.modules() if isinstance(part, kind)]
    were_off = [layer.disable_adapters for layer in layers]
    trained = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield
    finally:
        for layer, was_off in zip(layers, were_off, strict=True):
            layer.enable_adapters(enabled=not was_off)
        for weight, trains in trained:
            weight.requires_grad_(trains)


class Patched(nn.Module):
    """A linear layer plus a dense matrix that versions of the run add to its weight."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.patch: Tensor
        patch = torch.zeros(sizes_of(base), dtype=torch.float32, device=self.weight.device)
        self.register_buffer("patch", patch)

    @property
    def weight(self) -> Tensor:
        """The base's weight, of which peft reads device and dtype."""
        found: Tensor = self.base.weight  # type: ignore[assignment]
        return found

    def forward(self, values: Tensor) -> Tensor:
        """Compute the layer with the patch."""
        found: Tensor = self.base(values)
        return found + functional.linear(values, self.patch.to(values.dtype))


def _full_names(model: nn.Module, patterns: Sequence[str], more: Sequence[str]) -> list[str]:
    """Names of the weights that train whole, in the model's order."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"tune.full: no weight of the base matches {pattern}", "tune.full")
    heads = {*heads_of(model), *more}
    return [
        name
        for name in names
        if name in heads or any(fnmatch.fnmatchcase(name, one) for one in patterns)
    ]


def to_fp32(model: nn.Module, names: Sequence[str]) -> None:
    """Keep these weights in fp32, as peft keeps adapters: bf16 rounds most steps away."""
    for name in names:
        weight = model.get_parameter(name)
        weight.data = weight.data.float()


def _in_blocks(name: str, layers: str) -> bool:
    """Whether a layer is in one of the blocks: the first number in its name counts."""
    number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    for part in layers.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise TaskError(f"--layers {layers}: write numbers of blocks like 0-2,5")
        first = int(found[1])
        if number is not None and first <= number <= int(found[2] or first):
            return True
    return False

"""Hugging Face language models (GPT-2, Llama, Qwen2, Qwen3, OPT), built from a config and cut.

A part is the family's own trunk with some of its blocks. The front starts from token ids; every
other part is given hidden states where the trunk takes embeddings, with what a trunk does before
its first block (positions, projection, dropout) taken out. The trunk computes position ids, causal
and sliding masks and rotary angles again from the shape and the lengths, so only hidden states
cross a cut, and there are no key-value caches. Sequences are padded at their end.

`transformers` is an extra (`pip install 'fsl-async[hf]'`), imported when a model is built, never
before.

Linear layers may have weights that bitsandbytes holds in 4 or 8 bits (QLoRA, arXiv:2305.14314). The
packed weight is a frozen parameter; its scales are neither parameters nor buffers. Quantized layers
are subclasses of nn.Linear whose `weight` has another shape than (out, in).

`check_causal` detects language models that read the tokens that come later. Encoders load as causal
language models, too: BERT as BertLMHeadModel with `is_decoder = False`. The loss of the next token
then falls without anything being learned, because the token is in the input.
"""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fsl_async.errors import ConfigError, one_line, to_install
from fsl_async.learn.models.forward import drawing, evaluating


@attrs.frozen(slots=True)
class Family:
    """Where things are in a family's models.

    Dotted paths from the model to its trunk, names within the trunk.
    """

    trunk: str
    layers: str
    norm: str
    before: tuple[str, ...]
    """Modules that a trunk applies to embeddings before its first block."""
    embedding: str = "embed_tokens"
    positions: str = ""
    after: tuple[str, ...] = ()
    """Modules that it applies behind the norm."""


_LLAMA = Family("model", "layers", "norm", ())
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("transformer", "h", "ln_f", ("drop",), "wte", "wpe"),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "opt": Family(
        "model.decoder",
        "layers",
        "final_layer_norm",
        ("project_in",),
        positions="embed_positions",
        after=("project_out",),
    ),
}
"""By `config.model_type`."""


def build(family: str, sizes: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """A model with fresh weights; `sizes` are the fields of the family's config.

    Nothing is downloaded.

    The same family, sizes and seed give the same weights. Raises ConfigError: unknown family, no
    `transformers`, wrong sizes.
    """
    if family not in FAMILIES:
        raise ConfigError(
            f"model family {family!r} is unknown: {', '.join(FAMILIES)}", "model.family"
        )
    transformers = extra("transformers")
    config = _config(transformers, family, sizes)
    with drawing(torch.device("cpu"), seed, "model"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def _config(transformers: Any, family: str, sizes: Mapping[str, Any]) -> Any:
    """The family's config, tried out on a model without memory."""
    try:
        known = transformers.AutoConfig.for_model(family)
    except ValueError as error:
        raise ConfigError(
            f"transformers {transformers.__version__} lacks {family}: install a newer one",
            "model.family",
        ) from error
    wrong = [name for name in sizes if not hasattr(known, name)]
    if wrong:
        raise ConfigError(f"{family} has no size {wrong[0]!r}", "model.sizes")
    try:
        config = transformers.AutoConfig.for_model(family, **sizes)
        with torch.device("meta"):
            transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(
            f"{family} cannot be built: {one_line(str(error))}", "model.sizes"
        ) from error
    return config


def extra(name: str, of: str = "hf") -> Any:
    """Import a module of the extra `of`. ConfigError: it is not installed, and how to get it."""
    # peft imports it where it is installed, and it warns of optional kernels.
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with collector_paused():
            return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported ({error}): {to_install(of)}") from error
    finally:
        logger.setLevel(level)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Temporarily stop Python's cyclic garbage collector.

    Imports of torch, transformers and peft make many objects and little garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """A model's dtype for `from_pretrained` and `from_config`: transformers renamed it in 4.56."""
    return {"dtype" if _version() >= (4, 56) else "torch_dtype": dtype}


def has_marks() -> bool:
    """Whether transformers marks the weights that it has loaded from files. Imports nothing."""
    return "transformers" in sys.modules and _version() >= (5, 0)


def _version() -> tuple[int, ...]:
    return tuple(map(int, extra("transformers").__version__.split(".")[:2]))


def inject_adapters(config: Any, model: nn.Module, **named: Any) -> None:
    """Call `peft.inject_adapter_in_model`.

    Before 0.18 peft takes any `model.config` for one of transformers, so others are out of the way.
    """
    own = vars(model).get("config")
    if own is None or hasattr(own, "to_dict"):
        extra("peft").inject_adapter_in_model(config, model, **named)
        return
    del model.config
    try:
        extra("peft").inject_adapter_in_model(config, model, **named)
    finally:
        model.config = own


def is_family(model: nn.Module) -> bool:
    """Whether it is a causal language model of a family that we can cut. Imports nothing."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in FAMILIES and hasattr(model, "lm_head")


def layers(model: Any) -> int:
    """Return the number of blocks."""
    family = FAMILIES[model.config.model_type]
    return len(getattr(model.get_submodule(family.trunk), family.layers))


class _Nowhere(nn.Module):
    """Positions of a part whose input has them already: adds nothing."""

    def forward(self, *_: object, **__: object) -> Tensor:
        return torch.zeros(())


class HFPart(nn.Module):
    """Some blocks of a Hugging Face model.

    forward: ids int64 (B, T) or hidden states (B, T, C), lengths int64 (B,) or None.
    """

    def __init__(self, trunk: Any, head: nn.Module | None, family: Family) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self._family = family

    def forward(self, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return hidden states, or logits (B, T, V) where this part has the head."""
        mask = None
        if lengths is not None:
            places = torch.arange(values.shape[1], device=values.device)
            mask = (places < lengths[:, None]).long()
        given = {"inputs_embeds" if values.is_floating_point() else "input_ids": values}
        found: Tensor = self.trunk(**given, attention_mask=mask, use_cache=False).last_hidden_state
        return found if self.head is None else self.head(found)

    @property
    def layers(self) -> nn.ModuleList:
        """Its blocks."""
        found: nn.ModuleList = getattr(self.trunk, self._family.layers)
        return found

    def first_blocks(self, count: int) -> HFPart:
        """A part of the same weights: only the first `count` blocks, then norm and head.

        For auxiliary models.
        """
        trunk = _trunk(self.trunk, self._family, 0, count, first=True, last=True)
        return HFPart(trunk, self.head, self._family)


def part(model: Any, start: int, stop: int, *, first: bool, last: bool) -> nn.Module:
    """The blocks from `start` to `stop`; first and last: with the ends of the model."""
    family = FAMILIES[model.config.model_type]
    trunk = model.get_submodule(family.trunk)
    own = _trunk(trunk, family, start, stop, first=first, last=last)
    return HFPart(own, model.lm_head if last else None, family)


def _trunk(whole: Any, family: Family, start: int, stop: int, *, first: bool, last: bool) -> Any:
    """A trunk of the blocks start ... stop - 1.

    Structure is copied, weights are shared with `whole`.

    `first` and `last`: it keeps what `whole` has in front of and behind the blocks.
    """
    shared = {id(tensor): tensor for tensor in (*whole.parameters(), *whole.buffers())}
    trunk = copy.deepcopy(whole, shared)  # the memo makes deepcopy take tensors as they are
    setattr(trunk, family.layers, getattr(trunk, family.layers)[start:stop])
    trunk.config.num_hidden_layers = stop - start
    if getattr(trunk.config, "layer_types", None):
        trunk.config.layer_types = trunk.config.layer_types[start:stop]
    if not first:
        setattr(trunk, family.embedding, None)
        if family.positions:
            setattr(trunk, family.positions, _Nowhere())
        for name in family.before:
            setattr(trunk, name, nn.Identity() if name == "drop" else None)
    if not last:
        setattr(trunk, family.norm, nn.Identity())
        for name in family.after:
            setattr(trunk, name, None)
    return trunk


_4BIT, _8BIT = "Params4bit", "Int8Params"
_LAYERS = ("Linear4bit", "Linear8bitLt")


def is_quantized(layer: nn.Module) -> bool:
    """Whether bitsandbytes holds the layer's weight. Imports nothing."""
    return type(getattr(layer, "weight", None)).__name__ in {_4BIT, _8BIT}


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each quantized layer."""
    return ((name, part) for name, part in model.named_modules() if is_quantized(part))


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear layer: nn.Linear, Conv1D of transformers, or quantized."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    weight: Any = layer.weight
    rows, columns = weight.shape
    return int(columns), int(rows)  # Conv1D keeps its weight transposed


def dense_weight(layer: nn.Module) -> Tensor:
    """Return the weight of a linear layer; of a quantized one, dequantized, fp32 (out, in)."""
    weight: Any = layer.weight
    found: Tensor = weight
    if type(weight).__name__ == _4BIT:
        functional = extra("bitsandbytes", "quantized").functional
        found = functional.dequantize_4bit(weight.data, weight.quant_state).float()
    elif type(weight).__name__ == _8BIT:
        # The scale of each row is with the weight until the layer computes, then in its state.
        state: Any = layer.state
        scales = state.SCB if weight.SCB is None else weight.SCB
        found = weight.data.float() * (scales.float() / 127).to(weight.device)[:, None]
    return found


def dense_layer(layer: nn.Module) -> nn.Module:
    """Return nn.Linear in fp32 for a quantized layer, and any other layer as it is."""
    return _dense(layer) if is_quantized(layer) else layer


def _dense(layer: nn.Module) -> nn.Module:
    weight: Any = layer.weight
    dense = weight.data.float() if weight.is_floating_point() else dense_weight(layer).detach()
    out, inputs = sizes_of(layer)
    made = nn.Linear(inputs, out, bias=False, device="meta")
    made.weight = nn.Parameter(dense, requires_grad=False)
    made.bias = layer.bias  # type: ignore[assignment]
    return made.train(layer.training)


def dequantize_whole(model: nn.Module, names: Iterable[str]) -> None:
    """Replace the quantized layers that have these weights by nn.Linear: they train whole.

    transformers packs heads like any layer. A new head is a layer of bitsandbytes, too, with values
    that are not packed, which fails when it computes.
    """
    for name in dict.fromkeys(name.rpartition(".")[0] for name in names):
        layer = model.get_submodule(name)
        if any(base.__name__ in _LAYERS for base in type(layer).__mro__):
            model.set_submodule(name, _dense(layer))


def dequantize(model: nn.Module) -> None:
    """Replace all quantized layers by `dense_layer`, in place, and clear the config's note."""
    for name, layer in list(quantized_layers(model)):
        model.set_submodule(name, dense_layer(layer))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name in _MARKS:
        vars(model).pop(name, None)


_MARKS = (
    "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer",
    "quantization_method", "_weight_conversions",
)  # fmt: skip
"""Attributes by which transformers and peft recognize a quantized model, and save it as one."""


def keep_packed(model: nn.Module) -> None:
    """Have 4-bit layers keep their packed weights as they are, or were.

    On some processors bitsandbytes packs them in another order, with scales in bf16, when they
    first compute in evaluation mode. Their digest and the loss would change in the run, and layers
    packed so give no gradients.
    """
    for _, layer in quantized_layers(model):
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            layer.state_dict()  # which restores the order


TOKENS = 8
MOST_CHANGE, MOST_NARROW_CHANGE = 1e-3, 3e-2
"""Limits of the change of earlier logits, as a share of that of later ones. In fp32 causal models
have 0 to 1e-5, encoders with random weights 3e-3 and more; in bf16 rounding alone gives 1e-2."""


def check_causal(model: nn.Module, log: Callable[[str], None]) -> None:
    """Raise ConfigError where a causal language model of transformers is not causal.

    One forward pass of two rows of 8 tokens, of which the last 4 differ: logits at the first 4 must
    be the same. Models of other classes pass, such as those of masked language modeling. A model
    that does not compute from tokens alone is a line for the log.
    """
    found = _causal_class(model)
    if found is None:
        return
    keep_packed(found)
    words = int(found.get_input_embeddings().weight.shape[0])
    device = found.get_input_embeddings().weight.device
    first = torch.arange(2, 2 + TOKENS, device=device) % words
    other = torch.cat([first[: TOKENS // 2], (words - 1 - first[TOKENS // 2 :]) % words])
    try:
        with torch.no_grad(), evaluating(model):
            one, two = found(input_ids=torch.stack([first, other])).logits.float()
    except (RuntimeError, TypeError, ValueError) as error:
        log(f"not checked that {type(found).__name__} is causal: {one_line(str(error))[:200]}")
        return
    change = (one - two).abs().amax(-1)
    earlier, later = change[: TOKENS // 2].max(), change[TOKENS // 2 :].max()
    is_fp32 = next(found.parameters()).dtype.itemsize >= 4
    if earlier > later * (MOST_CHANGE if is_fp32 else MOST_NARROW_CHANGE):
        raise ConfigError(
            f"a {found.config.model_type} model ({type(found).__name__}) reads the tokens that it"
            " should predict: take a base that was trained to predict the next token, or"
            " tune.objective = classify"
        )


def _causal_class(model: nn.Module) -> Any:
    """The first module of a class that transformers lists as a causal language model."""
    if "transformers" not in sys.modules:
        return None
    listed = extra("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = set(listed.values())
    for part in model.modules():
        if any(kind.__name__ in names for kind in type(part).__mro__):
            return part
    return None

"""Linear layers whose weights bitsandbytes holds in 4 or 8 bits (QLoRA, arXiv:2305.14314).

The packed weight is a frozen parameter; its scales are neither parameters nor buffers. Quantized
layers are subclasses of nn.Linear whose `weight` has another shape than (out, in).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fsl_async.learn.models.hf import extra

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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

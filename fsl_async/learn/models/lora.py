"""LoRA (Hu et al., arXiv:2106.09685) on either part, by `peft`.

Only low-rank additions to linear layers train and are exchanged.

Weights that are frozen never cross the wire and are not in checkpoints: every site must have the
same ones, from the same seed or files.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from fsl_async.errors import ConfigError, one_line
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.models.heads import tied_layers, trunk_of
from fsl_async.learn.models.hf import extra, inject_adapters
from fsl_async.learn.models.targets import is_head


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

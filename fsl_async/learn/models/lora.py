"""LoRA (Hu et al., arXiv:2106.09685) on either part, by `peft`.

Only low-rank additions to linear layers train and are exchanged.

Weights that are frozen never cross the wire and are not in checkpoints: every site must have the
same ones, from the same seed or files.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fsl_async.errors import ConfigError, one_line
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.models.heads import tied_layers, trunk_of
from fsl_async.learn.models.hf import extra, inject_adapters
from fsl_async.learn.models.targets import is_head


def apply_lora(
    module: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Freeze `module` and add adapters in place, before any optimizer is made.

    Returns the names of what trains now.

    `targets`: last parts of names of linear layers; none means all but heads and tied layers. The
    second factor starts at zero, so the outputs do not change. Raises ConfigError: no `peft`, or
    nothing to adapt.
    """
    peft = extra("peft")
    layers = linear_layers(module)
    tied = tied_layers(module, layers)
    trunk = trunk_of(module)
    found = list(targets) or [
        name for name in layers if name not in tied and not is_head(name, trunk)
    ]
    if not found:
        raise ConfigError("LoRA finds no linear layers in this part", "split.lora")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=found,
        # GPT-2 keeps its linear layers transposed, as Conv1D; peft would warn and set this by
        # itself
        fan_in_fan_out=any(type(part).__name__ == "Conv1D" for part in module.modules()),
    )
    with drawing(torch.device("cpu"), seed, "lora"):
        try:
            inject_adapters(config, module)
        except ValueError as error:
            raise ConfigError(f"LoRA: {one_line(str(error))}", "split.lora") from error
    return [name for name, weight in module.named_parameters() if weight.requires_grad]


def linear_layers(module: nn.Module) -> list[str]:
    """Full names of linear layers, heads too."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    ]

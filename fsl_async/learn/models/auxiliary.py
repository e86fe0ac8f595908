"""Auxiliary models at a client.

They are small nets that map activations at the cut to outputs, so that it can train without
waiting.

    "linear"              one linear layer; images are averaged over their places first
    "blocks:2"            the first 2 pieces of the split server's part and a head: for
                          transformers 2 blocks, norm and head, for an nn.Sequential 2 children with
                          weights, then as "linear"
    "file.py:function"    the user's own: function(shape, outputs) -> nn.Module; `shape` is that of
                          one sample's activations, `outputs` the outputs' last dimension

ResNet-18 cut after "layer2" with "blocks:1" is the auxiliary model FSL-SAGE was published with
(stage "layer3" and a linear layer: 8,419,408 bytes for 10 classes). Pieces taken from the split
server's part start with its weights: the estimate of the split server's gradient starts close. The
head of a language model is a copy of its own; where it must not cross the wire, train by LoRA.
"""

import copy

import torch
from torch import Tensor, nn

from fsl_async.errors import ConfigError, TaskError, one_line
from fsl_async.learn.models.cuts import Chain, CutModel
from fsl_async.learn.models.forward import Batch, call, drawing, evaluating
from fsl_async.learn.models.gpt import GPTPart
from fsl_async.learn.models.hf import HFPart
from fsl_async.learn.user_code import load_function


class AuxiliaryError(ConfigError):
    """An auxiliary model does not fit the cut, or cannot be made. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, key="split.auxiliary")


KINDS = "linear, blocks:N, file.py:function"


def build(kind: str, model: CutModel, example: Batch, *, seed: int = 0) -> nn.Module:
    """The auxiliary model called `kind` for `model`, checked with `example`, a batch of its shapes.

    Raises AuxiliaryError in one line: no such kind, too many blocks, outputs that do not fit, a
    user's function that fails.
    """
    if model.server is None or model.tail is not None:
        raise AuxiliaryError(
            "an auxiliary model needs a split server's part that ends in the outputs"
        )
    values, outputs = _shapes(model, example)
    shape, width = tuple(values.shape[1:]), outputs.shape[-1]
    with drawing(torch.device("cpu"), seed, "auxiliary"):
        if kind == "linear":
            made: nn.Module = _linear(shape, width)
        elif kind.startswith("blocks:"):
            made = _blocks(kind, model.server, values, width)
        elif ":" in kind:
            made = _own(kind, shape, width)
        else:
            raise AuxiliaryError(f"auxiliary model {kind!r} is unknown: {KINDS}")
    check(made, values, outputs, example.lengths, kind)
    return made.train()


def check(
    model: nn.Module, values: Tensor, outputs: Tensor, lengths: Tensor | None, kind: str
) -> None:
    """Raise AuxiliaryError unless the model maps activations to outputs, differentiably."""
    given = values.detach().requires_grad_()
    try:
        with evaluating(model):
            found = call(model, given, lengths)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise AuxiliaryError(
            f"auxiliary model {kind!r} cannot take activations of shape {tuple(values.shape)}:"
            f" {one_line(str(error))}"
        ) from error
    if not isinstance(found, Tensor) or found.shape != outputs.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise AuxiliaryError(
            f"auxiliary model {kind!r} gives {got} for a batch where the split server's part gives"
            f" {tuple(outputs.shape)}"
        )
    way = found.requires_grad and torch.autograd.grad(found.sum(), given, allow_unused=True)[0]
    if not isinstance(way, Tensor):
        raise AuxiliaryError(f"auxiliary model {kind!r} passes no gradient to its input")


def _shapes(model: CutModel, example: Batch) -> tuple[Tensor, Tensor]:
    """Activations and outputs for the example, without a trace in the parts."""
    if model.server is None:
        raise AuxiliaryError("there is no server's part")
    with torch.no_grad(), evaluating(model.client, model.server):
        values = call(model.client, example.inputs, example.lengths)
        return values, call(model.server, values, example.lengths)


def _linear(shape: tuple[int, ...], width: int) -> nn.Module:
    model = Chain()
    if len(shape) == 3:
        model.add_module("pool", nn.AdaptiveAvgPool2d(1))
        model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(shape[0] if len(shape) == 3 else shape[-1], width))
    return model


def _blocks(kind: str, server: nn.Module, values: Tensor, width: int) -> nn.Module:
    text = kind.removeprefix("blocks:")
    count = int(text) if text.isdecimal() else 0
    if isinstance(server, GPTPart | HFPart):
        there = len(server.blocks if isinstance(server, GPTPart) else server.layers)
    elif isinstance(server, nn.Sequential):
        pieces = [child for child in server if _has_weights(child)]
        there = len(pieces) - 1  # the last one is the head
    else:
        raise AuxiliaryError(f"auxiliary model {kind!r}: a {type(server).__name__} has no blocks")
    if not 1 <= count <= there:
        raise AuxiliaryError(
            f"auxiliary model {kind!r}: the split server's part has blocks:1 to blocks:{there}"
            if there
            else f"auxiliary model {kind!r}: the split server's part has no blocks besides its head"
        )
    if isinstance(server, GPTPart | HFPart):
        return copy.deepcopy(server.first_blocks(count))
    model = Chain()
    for name, child in server._modules.items():  # noqa: SLF001 - one object may stand there twice
        if child is None:
            continue
        if _has_weights(child):
            if count == 0:
                break
            count -= 1
        model.add_module(name, copy.deepcopy(child))
    with torch.no_grad(), evaluating(model):
        shape = tuple(model(values).shape[1:])
    for name, child in _linear(shape, width).named_children():
        model.add_module(f"auxiliary_{name}", child)
    return model


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _own(kind: str, shape: tuple[int, ...], width: int) -> nn.Module:
    try:
        function = load_function("auxiliary model", kind, ("shape", "outputs"))
    except TaskError as error:
        raise AuxiliaryError(error.message) from error
    try:
        model = function(shape, width)
    except Exception as error:
        raise AuxiliaryError(
            f"auxiliary model {kind!r} raised {type(error).__name__}: {one_line(str(error))}"
        ) from error
    if not isinstance(model, nn.Module):
        raise AuxiliaryError(
            f"auxiliary model {kind!r} gave a {type(model).__name__}, not a module"
        )
    return model

"""Where a model can be cut, and the parts it falls into.

A model is a row of pieces. One cut gives the client the front (inputs -> activations) and the
server the rest (activations -> outputs). A second cut, `tail_cut`, gives the last pieces back to
the client (U-shape): the head, the loss and therefore the labels stay at home.

    nn.Sequential        cut "layer2" or "5": after the child of that name, or of that number from 0
    the built-in GPT     cut "2": embedding and the first 2 blocks | the other blocks, norm and head
    Hugging Face models  the same (GPT-2, Llama, Qwen2, Qwen3, OPT families; see hf.py)

Tied weights. A weight that both the client and the split server would hold becomes two: the split
server's is a copy of its own, equal at the start, and trained apart from then on. With a U-shape
the embedding and the head are both the client's, and stay tied: the model trained is the uncut one.
Fully tied across the cut would cost two more transfers of the largest matrix per step.

`split` copies nothing else: the parts hold the model's own weights, and the model should not be
used any more.

Auxiliary models are small nets at a client that map activations at the cut to outputs, so that it
can train without waiting.

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
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import attrs
import torch
from torch import Tensor, nn

from fsl_async.errors import ConfigError, TaskError, one_line
from fsl_async.learn.models import gpt, hf
from fsl_async.learn.models.forward import Batch, call, drawing, evaluating
from fsl_async.learn.models.gpt import GPT, GPTPart
from fsl_async.learn.models.hf import HFPart
from fsl_async.learn.user_code import load_function


class CutError(ConfigError):
    """A model cannot be cut there. One line, with the cuts that exist."""

    def __init__(self, message: str) -> None:
        super().__init__(message, key="split.cut")


@attrs.frozen(slots=True, eq=False)
class CutModel:
    """The parts of a cut model. `server` is None when all of it is the client's (FedAvg)."""

    client: nn.Module
    server: nn.Module | None
    tail: nn.Module | None = None
    cut: str = ""
    tail_cut: str = ""

    def run(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the outputs of the uncut model."""
        for part in (self.client, self.server, self.tail):
            if part is not None:
                inputs = call(part, inputs, lengths)
        return inputs


class Chain(nn.Sequential):
    """Some children of an nn.Sequential under the names they had; lengths are ignored."""

    def forward(self, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Run the children one after the other."""
        for child in self:
            values = child(values)
        return values


def cuts_of(model: nn.Module) -> tuple[str, ...]:
    """The cuts that exist, front to back. Raises CutError for a model that cannot be cut."""
    blocks = _blocks(model)
    if blocks is None:
        return tuple(model._modules)[:-1]  # noqa: SLF001 - one may stand there twice
    return tuple(str(number) for number in range(blocks.layers(model)))


def split(model: nn.Module, cut: str | int, tail_cut: str | int | None = None) -> CutModel:
    """Cut `model` once, or twice for a U-shape.

    Raises CutError, in one line with the cuts that exist.
    """
    places = cuts_of(model)
    first = _place(model, places, cut, "cut", 0)
    if tail_cut is None:
        client, server = _parts(model, [first])
        return CutModel(client, _untied(server, client), None, places[first])
    # Blocks: the second cut may lie behind the last one, so that only the head is the client's
    # again.
    ends = places if _blocks(model) is None else (*places, str(len(places)))
    last = _place(model, ends, tail_cut, "tail cut", first + 1)
    client, server, tail = _parts(model, [first, last])
    return CutModel(client, _untied(server, client, tail), tail, places[first], ends[last])


def in_one(model: nn.Module) -> CutModel:
    """No cut: everything at the client, as FedAvg has it, in a part that takes lengths."""
    return CutModel(_parts(model, [])[0], None)


def _blocks(model: nn.Module) -> ModuleType | None:
    """The module that cuts a decoder-only transformer; None for an nn.Sequential.

    A cut of the former is the number of blocks in front of it. Raises CutError for other models.
    """
    if isinstance(model, GPT):
        return gpt
    if hf.is_family(model):
        return hf
    if isinstance(model, nn.Sequential):
        return None
    raise CutError(
        f"a {type(model).__name__} cannot be cut: give an nn.Sequential, the built-in GPT, or a "
        f"Hugging Face model of the families {', '.join(hf.FAMILIES)}"
    )


def _parts(model: nn.Module, places: Sequence[int]) -> list[nn.Module]:
    """Cut at the places with these numbers."""
    blocks = _blocks(model)
    if blocks is not None:
        bounds = itertools.pairwise([0, *places, blocks.layers(model)])
        return [
            blocks.part(model, start, stop, first=not number, last=number == len(places))
            for number, (start, stop) in enumerate(bounds)
        ]
    children = list(model._modules.items())  # noqa: SLF001 - one may stand there twice
    ends = [0, *(place + 1 for place in places), len(children)]
    return [
        Chain(OrderedDict(children[start:stop]))  # type: ignore[arg-type]
        for start, stop in itertools.pairwise(ends)
    ]


def _place(model: nn.Module, places: Sequence[str], cut: str | int, what: str, lowest: int) -> int:
    text = str(cut)
    if text in places:
        found = places.index(text)
    elif text.isdecimal() and int(text) < len(places):
        found = int(text)
    else:
        found = -1
    if found < lowest:
        kind = type(model).__name__
        there = ", ".join(places[lowest:]) or "none"
        behind = f" behind {places[lowest - 1]!r}" if lowest else ""
        raise CutError(f"{kind} has no {what} {text!r}{behind}; cuts that exist: {there}")
    return found


def _untied(server: nn.Module, *kept: nn.Module) -> nn.Module:
    """The server's part with weights of its own instead of those that the client holds as well.

    Modules are copied, because one object may stand in both parts; tensors only the split server
    has are taken as they are. What is tied within the split server stays tied.
    """
    theirs = {id(tensor) for part in kept for tensor in (*part.parameters(), *part.buffers())}
    own = (*server.parameters(), *server.buffers())
    return copy.deepcopy(server, {id(each): each for each in own if id(each) not in theirs})


class AuxiliaryError(ConfigError):
    """An auxiliary model does not fit the cut, or cannot be made. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, key="split.auxiliary")


KINDS = "linear, blocks:N, file.py:function"


def build_auxiliary(kind: str, model: CutModel, example: Batch, *, seed: int = 0) -> nn.Module:
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
            made = _first_pieces(kind, model.server, values, width)
        elif ":" in kind:
            made = _own(kind, shape, width)
        else:
            raise AuxiliaryError(f"auxiliary model {kind!r} is unknown: {KINDS}")
    _check_auxiliary(made, values, outputs, example.lengths, kind)
    return made.train()


def _check_auxiliary(
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


def _first_pieces(kind: str, server: nn.Module, values: Tensor, width: int) -> nn.Module:
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
        return own_module("auxiliary model", kind, {"shape": shape, "outputs": width})
    except TaskError as error:
        raise AuxiliaryError(error.message) from error


def own_module(
    what: str,
    text: str,
    arguments: Mapping[str, object],
    within: AbstractContextManager[None] | None = None,
) -> nn.Module:
    """Return the module that a function of the user's makes of `arguments`, given by position.

    what: for error texts. within: in which it is called. Raises TaskError in one line.
    """
    function = load_function(what, text, tuple(arguments))
    try:
        with within or nullcontext():
            model = function(*arguments.values())
    except Exception as error:
        raise TaskError(
            f"{what} {text!r} raised {type(error).__name__}: {one_line(str(error))}"
        ) from error
    if not isinstance(model, nn.Module):
        raise TaskError(f"{what} {text!r} gave a {type(model).__name__}, not a module")
    return model

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
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType

import attrs
from torch import Tensor, nn

from fsl_async.errors import ConfigError
from fsl_async.learn.models import gpt, hf
from fsl_async.learn.models.forward import call
from fsl_async.learn.models.gpt import GPT


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
        """What the uncut model gives."""
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


def whole(model: nn.Module) -> CutModel:
    """No cut: everything at the client, as FedAvg has it."""
    return CutModel(model, None)


def in_one(model: nn.Module) -> CutModel:
    """The same as one part, which takes lengths like any other."""
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

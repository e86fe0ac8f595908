"""Outputs of frozen modules, kept while one batch is measured at many weights.

Zeroth order runs a model twice for each direction of a step, on the same batch. Modules that train
nothing, and whose inputs do not depend on what trains, give the same outputs each time: the base
below a head that trains alone, or the blocks below the first with adapters. They are computed once
a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn


class KeptOutputs:
    """As a context: `model` computes its frozen parts once until `forget`.

    changing: the weights that are set meanwhile, or views of them, whether they require a gradient
    or not: some rules of merging let one factor rest for a round. A module takes part if it has
    weights and none of those. It must be in evaluation mode
    and give the same outputs for the same inputs. Inputs are compared by value, so a module whose
    inputs differ is computed, and from then on nothing of it is kept; so is one whose outputs were
    written to in place. What is kept are the outputs of one batch, not what a backward pass needs.
    """

    def __init__(self, model: nn.Module, changing: Iterable[Tensor]) -> None:
        storages = {_storage(one) for one in changing}
        self._modules = [_Kept(module) for module in _largest(model, storages)]

    def __enter__(self) -> Self:
        for one in self._modules:
            one.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._modules:
            one.end()

    def forget(self) -> None:
        """Forget all outputs: the next batch is another one."""
        for one in self._modules:
            one.forget()


class _Kept:
    """One module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._varies = False
        self._inputs: Any = None  # as long as nothing is kept
        self._outputs: Any = None
        self._writes: list[int] = []

    def begin(self) -> None:
        self._module.forward = self._call

    def end(self) -> None:
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own

    def forget(self) -> None:
        self._inputs = self._outputs = None

    def _call(self, *given: Any, **named: Any) -> Any:
        if self._varies:
            return self._forward(*given, **named)
        if self._inputs is None:
            self._inputs, self._outputs = (given, named), self._forward(*given, **named)
            self._writes = self._count_writes()
        elif self._writes != self._count_writes() or not _same(self._inputs, (given, named)):
            self._varies = True
            self.forget()
            return self._forward(*given, **named)
        return self._outputs

    def _count_writes(self) -> list[int]:
        return [one._version for one in _tensors((self._inputs, self._outputs))]  # noqa: SLF001


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _largest(module: nn.Module, changing: set[int]) -> Iterator[nn.Module]:
    """The largest modules with weights of which none has one of these storages."""
    has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    own = {_storage(one) for one in (*module.parameters(), *module.buffers())}
    if has_forward and not own & changing:
        if own:
            yield module
        return
    for child in module.children():
        yield from _largest(child, changing)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal. False for kinds that are not known to be values."""
    if left is right:
        return left is None or isinstance(left, Tensor | bool | int | float | str)
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return isinstance(left, bool | int | float | str) and left == right

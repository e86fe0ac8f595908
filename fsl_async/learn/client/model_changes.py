"""Detects what changes in a model after it was attached, and is not exchanged.

The tensors of a run are fixed by its first version. A layer that is unfrozen or added later trains
at this client alone, and integers are never averaged: the next delta logs each of them once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.shards import plain_name
from fsl_async.learn.models.saving import held_state


class ModelChanges:
    """What trains in a model, and its integers, since it was attached."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._known = set(self._alone())
        self._weights_there = dict(self._identities())
        self._integers = _integers(weights.module)
        """Of each buffer, by name, what changes when it is replaced or written to."""

    def lines(self) -> list[str]:
        """What has changed since the last call, for people: a line each."""
        lines = []
        added = [name for name in self._alone() if name not in self._known]
        self._known.update(added)
        if added:
            lines.append(
                f"{_some(added)} trains here and is not exchanged: it was frozen, or not in the"
                " model, at fed.attach, and the tensors of a run are fixed by its first version;"
                " start a new run with the final model"
            )
        now = dict(self._identities())
        replaced = [name for name, one in self._weights_there.items() if now.get(name, one) != one]
        self._weights_there = now
        if replaced:
            lines.append(
                f"{_some(replaced)} was replaced by another tensor after fed.attach: an optimizer"
                " that was made before does not train it, and its new values are sent as work"
            )
        changed = [
            name
            for name, one in self._weights.module.named_buffers()
            if name in self._integers and self._integers[name] != _mark(one)
        ]
        for name in changed:
            del self._integers[name]
        if changed:
            lines.append(
                f"{_some(changed)} has changed since fed.attach and stays this client's own:"
                " integers are not averaged; keep it as floating point if it should be"
            )
        return lines

    def _identities(self) -> Iterator[tuple[str, int]]:
        """Weights that train, by name, and what tells each object from another."""
        for name, weight in self._weights.module.named_parameters():
            if weight.requires_grad:
                yield plain_name(name), id(weight)

    def _alone(self) -> Iterator[str]:
        """Names of what trains and is not exchanged."""
        return self._weights.trained_alone()


def _integers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Marks of persistent buffers of integers and truth values, but for counters of batch norm."""
    listed = held_state(module)
    counters = {
        id(part.num_batches_tracked) for part in module.modules() if isinstance(part, _NormBase)
    }
    return {
        name: _mark(one)
        for name, one in module.named_buffers()
        if name in listed and id(one) not in counters
        if not (one.is_floating_point() or one.is_complex())
    }


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version  # noqa: SLF001


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{more}"

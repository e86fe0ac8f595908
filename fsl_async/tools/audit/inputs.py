"""The inputs that the first trained layers can have, one for each token and position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from fsl_async.errors import DataError
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.tune.tokens import TokenBatch

POSITIONS = 32
"""Positions of a sequence that are tried."""
BEHIND_POSITIONS = 3
"""Positions that are tried where a layer is behind others, so that each costs a forward pass."""
_TOKENS_AT_ONCE = 512
_ALIKE = 0.98
"""Least cosine, in the mean, of a real input with the one computed for its token alone."""


class _EnoughError(Exception):
    """Ends a forward pass at the layer that was waited for."""


@frozen
class FirstLayers:
    """The trained layers that see a sequence first, all with the same input.

    names: as in the model. positions: of a sequence that are told apart; 1: the input does not
    depend on the position. is_exact: whether the input depends on its own token alone; else the
    layers are behind others, and atoms are of sequences of one token.
    """

    names: tuple[str, ...]
    positions: int
    is_exact: bool
    vocabulary: int

    def place(self, number: int) -> tuple[int, int]:
        """The token and the position of an atom, by its number in the order of `atoms`."""
        return divmod(number, self.positions)

    def mixtures(self, delta: Mapping[str, Tensor]) -> Tensor:
        """The rows of these layers' changes: (rows, width), none where their inputs do not train.

        delta: changes of weights by the model's names.
        """
        found: list[Tensor] = []
        for layer in self.names:
            for name, change in delta.items():
                if name.startswith(f"{layer}.lora_A.") or name in {
                    f"{layer}.weight",
                    f"{layer}.base_layer.weight",
                }:
                    found.append(change)
        return torch.cat(found) if found else torch.empty(0, 1)


def first_layers(model: nn.Module, batch: TokenBatch) -> FirstLayers:
    """Find them, by a forward pass of `batch`. Raises DataError where no linear layer trains."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    layers = {
        name: module
        for name, module in model.named_modules()
        if _trains(name, module, trained) and isinstance(getattr(module, "in_features", None), int)
    }
    seen: list[tuple[str, Tensor]] = []

    def see(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen.append((name, given[0].detach()))

        return hook

    hooks = [module.register_forward_pre_hook(see(name)) for name, module in layers.items()]
    try:
        with evaluating(model), torch.no_grad():
            model(
                input_ids=torch.from_numpy(batch.ids), attention_mask=torch.from_numpy(batch.mask)
            )
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise DataError("no linear layer of this model trains: there is nothing that is attacked")
    first = seen[0][1]
    names = tuple(name for name, given in seen if given.data_ptr() == first.data_ptr())
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    length = min(POSITIONS, batch.ids.shape[1])
    ids, real = torch.from_numpy(batch.ids[:, :length]), torch.from_numpy(batch.mask[:, :length])
    alone = torch.stack(
        [_alone(model, names[0], row[:, None].expand(-1, length)) for row in ids[:2]]
    )
    # alone: (B, tokens, positions, width); a real input is that of its own token and position.
    own = alone.diagonal(dim1=1, dim2=2).movedim(-1, 1)
    cosines = torch.cosine_similarity(own, first[:2, :length], dim=-1)[real[:2] > 0]
    is_exact = float(cosines.mean()) > _ALIKE
    is_placed = not torch.allclose(alone[:, :, :1], alone, atol=1e-5)
    positions = (length if is_exact else min(BEHIND_POSITIONS, length)) if is_placed else 1
    return FirstLayers(names, positions, is_exact, int(vocabulary))


def atoms(model: nn.Module, layers: FirstLayers) -> Iterator[Tensor]:
    """Yield the inputs of all tokens at all positions, in blocks, fp32 (atoms, width)."""
    for begin in range(0, layers.vocabulary, _TOKENS_AT_ONCE):
        tokens = torch.arange(begin, min(begin + _TOKENS_AT_ONCE, layers.vocabulary))
        found = _alone(model, layers.names[0], tokens[:, None].expand(-1, layers.positions))
        yield found.reshape(-1, found.shape[-1])


def _alone(model: nn.Module, layer: str, ids: Tensor) -> Tensor:
    """The layer's inputs in sequences of one token each: (sequences, positions, width)."""
    caught: list[Tensor] = []

    def catch(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        caught.append(given[0].detach().float())
        raise _EnoughError

    hook = model.get_submodule(layer).register_forward_pre_hook(catch)
    try:
        with evaluating(model), torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except _EnoughError:
        return caught[0]
    finally:
        hook.remove()
    raise AssertionError("unreachable: the layer was seen before")


def _trains(name: str, module: nn.Module, trained: set[str]) -> bool:
    if ".lora_" in name:  # a factor, as a layer of its own
        return False
    of_layer = (f"{name}.weight", f"{name}.base_layer.weight")
    return any(one in trained for one in of_layer) or (
        hasattr(module, "lora_A") and any(one.startswith(f"{name}.lora_") for one in trained)
    )

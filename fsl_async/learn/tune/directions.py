"""Directions of signs in torch: the weights of a model plus and minus a step along them.

Bits come from `fsl_codecs.sign_words`, one for each coordinate, and are unpacked on the weights'
device. A step is one fp32 addition of +s or -s to each weight, without a multiplication, so CPU,
GPU and NumPy hold the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from fsl_async.store.manifest import Manifest
from fsl_codecs import sign_words

_WORD = 64
_PIECE_WORDS = 1 << 14
"""Words that are unpacked together: a million signs, 4 MiB of terms."""

Weights = Mapping[str, Tensor]


@frozen
class Place:
    """Where a tensor lies in the flat vector: name and first coordinate."""

    name: str
    offset: int


def places_of(manifest: Manifest, names: Sequence[str]) -> list[Place]:
    """Return where these tensors lie. names: as in the model, in the order of the manifest."""
    assert len(names) == len(manifest.tensors)
    return [Place(name, spec.offset) for name, spec in zip(names, manifest.tensors, strict=True)]


def moved(
    weights: Weights, places: Sequence[Place], key: Sequence[int], step: float
) -> dict[str, Tensor]:
    """Return copies of the weights plus `step` times the signs of a key.

    weights: float32. key: seed and stream (`fsl_codecs.direction_keys`). step: an fp32 number.
    """
    made = {place.name: weights[place.name].detach().clone() for place in places}
    add_to(made, places, [key], [step])
    return made


def add_to(
    weights: Weights, places: Sequence[Place], keys: Sequence[Sequence[int]], steps: Sequence[float]
) -> None:
    """Add each step times the signs of its key to the weights, in place, in this order.

    weights: float32 and contiguous.
    """
    with torch.no_grad():
        for place in places:
            flat = weights[place.name].detach().view(-1)
            assert flat.dtype == torch.float32, "a step of zeroth order needs fp32 weights"
            for key, step in zip(keys, steps, strict=True):
                _add(flat, place.offset, key, step)


def _add(flat: Tensor, offset: int, key: Sequence[int], step: float) -> None:
    both = torch.tensor([-step, step], dtype=torch.float32, device=flat.device)
    seed, stream = int(key[0]), int(key[1])
    first, last = offset // _WORD, (offset + len(flat) - 1) // _WORD
    for word in range(first, last + 1, _PIECE_WORDS):
        count = min(_PIECE_WORDS, last + 1 - word)
        begin = max(0, offset - word * _WORD)
        at = max(0, word * _WORD - offset)
        stop = min(len(flat), (word + count) * _WORD - offset)
        packed = sign_words(seed, stream, word, count).astype("<u8", copy=False).view(np.uint8)
        bits = torch.from_numpy(packed).to(flat.device)
        signs = unpacked(bits)[begin : begin + stop - at]
        flat[at:stop] += both[signs]


def unpacked(packed: Tensor) -> Tensor:
    """Return the bits of bytes, lowest first: int64 (8 * bytes,), 0 or 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).view(-1).long()

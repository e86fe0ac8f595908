"""Steps along directions of signs in torch, on any device.

On the CPU it is `fsl_codecs.add_signs`. For another device the bits are made on the CPU, one for
each coordinate, copied, and unpacked there. A step is one fp32 addition of +s or -s to each value,
without a multiplication, so all devices hold the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsl_codecs import add_signs, sign_words

_WORD = 64
_PIECE_WORDS = 1 << 16
"""Words that are unpacked together: four million signs, 16 MiB of terms and 32 MiB of indices."""


def add_steps(values: Tensor, keys: NDArray[np.uint64], steps: NDArray[np.float32]) -> None:
    """Add each step times the signs of its key to `values`, in place, one step after the other.

    values: float32 (n,), contiguous, all coordinates of the run's flat vector. keys: uint64 (steps,
    2). steps: float32 (steps,). See `fsl_codecs.add_signs`.
    """
    assert values.dtype == torch.float32, "a step of zeroth order needs fp32 values"
    if values.device.type == "cpu":
        add_signs(values.detach().numpy(), 0, keys, steps)
        return
    add_unpacked(values, keys, steps)


def add_unpacked(values: Tensor, keys: NDArray[np.uint64], steps: NDArray[np.float32]) -> None:
    """See `add_steps`; with torch's own operations."""
    with torch.no_grad():
        for (seed, stream), step in zip(keys.tolist(), steps.tolist(), strict=True):
            terms = torch.tensor([-step, step], dtype=torch.float32, device=values.device)
            for start in range(0, len(values), _PIECE_WORDS * _WORD):
                part = values[start : start + _PIECE_WORDS * _WORD]
                count = -(-len(part) // _WORD)
                packed = sign_words(seed, stream, start // _WORD, count).astype("<u8", copy=False)
                bits = unpacked(torch.from_numpy(packed.view(np.uint8)).to(values.device))
                part += terms[bits[: len(part)]]


def unpacked(packed: Tensor) -> Tensor:
    """Return the bits of bytes, lowest first: int64 (8 * bytes,), 0 or 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).view(-1).long()

"""Seeds derived by name, and the factors that adapters begin with. NumPy only: no torch."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from fsl_async.store.adapters.draws import drawn_a


def derived_seed(seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^63) of its own for everything that has a name."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def first_a(seed: int, layer: str, rank: int, columns: int) -> NDArray[np.float32]:
    """The factor A, float32 (rank, columns), that a layer's adapter begins with.

    seed: the run's. Uniform with variance 1 / (3 columns), drawn with the layer's name.
    """
    return drawn_a(derived_seed(seed, "lora", layer), 0, rank, columns)

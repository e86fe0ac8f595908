"""Seeds derived by name, and the factors that adapters begin with. NumPy only: no torch."""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray


def derived_seed(seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^63) of its own for everything that has a name."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def first_a(seed: int, layer: str, rank: int, columns: int) -> NDArray[np.float32]:
    """The factor A, float32 (rank, columns), that a layer's adapter begins with.

    seed: the run's. Uniform with variance 1 / (3 columns), drawn with the layer's name.
    """
    rng = np.random.Generator(np.random.Philox(key=derived_seed(seed, "lora", layer)))
    drawn = rng.random((rank, columns), dtype=np.float32)
    return (2.0 * drawn - 1.0) / np.float32(math.sqrt(columns))

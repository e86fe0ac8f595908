"""Random numbers that are the same on every machine: a stream for each seed and name.

The numbers are raw 64-bit words of NumPy's Philox, whose stream NumPy promises to keep; it does not
promise that of its distributions (NEP 19). The key is a hash of seed and name (`draws.stream`).
"""

import hashlib

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from fsl_async.store.rules.adapters.draws import drawn_a, stream

Words = npt.NDArray[np.uint64]


def random_words(seed: int, name: str, count: int) -> Words:
    """The first numbers of the stream `name`: uint64 (count,), uniform."""
    return stream(seed, name).random_raw(count)


def permutation(seed: int, name: str, count: int) -> npt.NDArray[np.int64]:
    """0 ... count - 1, sorted by the numbers of the stream `name`: int64 (count,).

    The sort is stable, so the result is unique.
    """
    return np.argsort(random_words(seed, name, count), kind="stable")


def derived_seed(seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^63) of its own for everything that has a name."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def first_a(seed: int, layer: str, rank: int, columns: int) -> NDArray[np.float32]:
    """The factor A, float32 (rank, columns), that a layer's adapter begins with.

    seed: the run's. Uniform with variance 1 / (3 columns), drawn with the layer's name.
    """
    return drawn_a(derived_seed(seed, "lora", layer), 0, rank, columns)

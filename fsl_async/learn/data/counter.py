"""Counter-based random numbers: number i of a named stream is a function of (seed, name, i).

The arithmetic is in integers only. Numbers are the same on every machine and in every version of
NumPy, whose generators may change their streams (NEP 19), and any part of a stream can be computed
without the rest. The function is Philox4x32 with ten rounds (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11); the key is a hash of seed and name.
"""

import hashlib

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from fsl_async.store.rules.adapters.draws import drawn_a

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(key: tuple[int, int], counter: tuple[Words, Words, Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10: two key words and four arrays of counter words to four arrays of words.

    All words are below 2^32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit numbers fits into 64 bits.
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_words(seed: int, name: str, count: int, start: int = 0) -> Words:
    """Numbers start ... start + count - 1 of the stream `name`: uint64 (count,), uniform."""
    digest = hashlib.sha256(f"fsl-counter-1/{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    first = start // 2
    block = np.arange(first, (start + count + 1) // 2, dtype=np.uint64)
    zero = np.zeros_like(block)
    w0, w1, w2, w3 = philox(key, (block & _LOW, block >> _HALF, zero, zero))
    pairs = np.stack([w0 | (w1 << _HALF), w2 | (w3 << _HALF)], axis=1).reshape(-1)
    return pairs[start - 2 * first :][:count]


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

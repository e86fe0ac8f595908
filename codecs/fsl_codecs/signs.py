"""Random signs: the directions of zeroth-order steps, the same bits on every machine.

    sign of coordinate q = bit q % 64 of word q // 64 of a raw Philox4x64-10 stream; 1 is +1

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Words and keys are those of
`numpy.random.Philox(key=[seed, stream], counter=0).random_raw()`. A stream has random access: any
part is computed without what comes before it. A step along signs is one fp32 addition for each
value, of +s or -s: without a multiplication, no machine can fuse or round it in another way.

This is the reference; the native codec gives the same bytes (`dispatch`).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import CodecUsageError
from .formats import Float32Array

Words = npt.NDArray[np.uint64]

_MULTIPLIERS: Final = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS: Final = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS: Final = 10
_BLOCK_WORDS: Final = 4
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_MASK: Final = (1 << 64) - 1
_AT_ONCE: Final = 1 << 15
"""Values that are added to together: what they need stays in the cache."""


def _multiply(factor: int, words: Words) -> tuple[Words, Words]:
    """The high and the low 64 bits of the products."""
    low, high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    words_low, words_high = words & _LOW, words >> _HALF
    middle = ((low * words_low) >> _HALF) + high * words_low
    other = low * words_high + (middle & _LOW)
    return high * words_high + (middle >> _HALF) + (other >> _HALF), np.uint64(factor) * words


def sign_words(seed: int, stream: int, first: int, count: int) -> Words:
    """Words `first` to `first + count` of the stream of a key: uint64 (count,).

    seed, stream: the key, 64 bits each.
    """
    block = first // _BLOCK_WORDS
    blocks = -(-(first + count) // _BLOCK_WORDS) - block
    # NumPy counts up before it computes.
    c0 = np.arange(block + 1, block + blocks + 1, dtype=np.uint64)
    c1, c2, c3 = np.zeros((3, blocks), np.uint64)
    for number in range(_ROUNDS):
        key0 = np.uint64((seed + number * _KEY_STEPS[0]) & _MASK)
        key1 = np.uint64((stream + number * _KEY_STEPS[1]) & _MASK)
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
    start = first - block * _BLOCK_WORDS
    return np.stack((c0, c1, c2, c3), axis=1).reshape(-1)[start : start + count]


def add_signs(values: Float32Array, offset: int, keys: Words, steps: Float32Array) -> None:
    """Add each step times the signs of its key to `values`, in place, one step after the other.

    values: float32 (n,), the coordinates from `offset` on. keys: uint64 (steps, 2), pairs of seed
    and stream. steps: float32 (steps,). Raises CodecUsageError.
    """
    check_steps(keys, steps)
    for at in range(0, len(values), _AT_ONCE):
        part = values[at : at + _AT_ONCE]
        first = (offset + at) // 64
        skip = offset + at - 64 * first
        count = -(-(skip + len(part)) // 64)
        for (seed, stream), step in zip(keys.tolist(), steps, strict=True):
            words = sign_words(seed, stream, first, count).astype("<u8", copy=False)
            bits = np.unpackbits(~words.view(np.uint8), bitorder="little")[skip : skip + len(part)]
            flips = bits.astype(np.uint32) << np.uint32(31)
            part += (flips ^ step.view(np.uint32)).view(np.float32)


def check_steps(keys: Words, steps: Float32Array) -> None:
    """Raise CodecUsageError unless each fp32 step has a key of two words."""
    if keys.shape != (len(steps), 2) or keys.dtype != np.uint64 or steps.dtype != np.float32:
        raise CodecUsageError("each fp32 step needs a key of two words")


__all__ = ["Words", "add_signs", "check_steps", "sign_words"]

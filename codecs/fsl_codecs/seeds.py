"""The frame format `seeds`: steps along directions that both sides compute, as scalars alone.

    frame = header (24 bytes), scalars                      all numbers little-endian
    header      magic "FSZ1", steps u16, probes u16, rounds u32, first u64, crc32
    scalars     fp32, rounds x steps x probes of them

`rounds` consecutive rounds, the first of which is number `first`: K steps of P probes each. The
direction of a probe is a function of the run's seed and of round, step and probe (`direction_keys`,
`fsl_codecs.signs`). The checksum is that of the 20 bytes before it and then of the scalars. It
detects damage and does not authenticate.
"""

import struct
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from .errors import CodecUsageError, FrameError, LimitError
from .formats import Float32Array
from .frame import Buffer, memory_of
from .signs import Words

SEEDS_MAGIC: Final = b"FSZ1"
SEEDS_HEADER_BYTES: Final = 24
MOST_STEPS: Final = 1024
"""Most steps of a round, and most probes of a step."""
MOST_SCALARS: Final = 1 << 20
"""Most scalars of a frame, which is then 4 MiB."""
MOST_ROUNDS: Final = 1 << 40
"""Rounds of a run: the number of a round shares a word of the key with its step and its probe."""
_HEADER: Final = struct.Struct("<4sHHIQ")
_CHECKSUM: Final = struct.Struct("<I")
_SCALAR_BYTES: Final = 4


@frozen(eq=False)
class SeedsFrame:
    """The scalars of consecutive rounds, from number `first` on: float32 (rounds, K, P)."""

    first: int
    scalars: Float32Array


def is_seeds(frame: Buffer) -> bool:
    """Whether a frame begins like one of this format."""
    start: bytes = memory_of(frame)[: len(SEEDS_MAGIC)].tobytes()
    return start == SEEDS_MAGIC


def _problem(rounds: int, steps: int, probes: int, first: int) -> str | None:
    if not (1 <= steps <= MOST_STEPS and 1 <= probes <= MOST_STEPS):
        return f"{steps} steps of {probes} probes: both must be from 1 to {MOST_STEPS}"
    if not rounds or not 0 <= first <= MOST_ROUNDS - rounds:
        return f"{rounds} rounds from number {first} on are not possible"
    return None


def encode_seeds(first: int, scalars: Float32Array) -> bytes:
    """A frame of the scalars (rounds, K, P) of rounds from `first` on; CodecUsageError if refused.

    NaN and infinity are kept.
    """
    if scalars.ndim != 3 or scalars.dtype != np.float32 or scalars.size > MOST_SCALARS:
        raise CodecUsageError(
            f"scalars must be fp32, rounds x steps x probes, and at most {MOST_SCALARS}"
        )
    rounds, steps, probes = scalars.shape
    if problem := _problem(rounds, steps, probes, first):
        raise CodecUsageError(problem)
    head = _HEADER.pack(SEEDS_MAGIC, steps, probes, rounds, first)
    payload = scalars.astype("<f4", copy=False).tobytes()
    return head + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(head))) + payload


def decode_seeds(frame: Buffer) -> SeedsFrame:
    """Parse a frame. FrameError, or LimitError for too many scalars; nothing is allocated before.

    Scalars may be NaN or infinite.
    """
    memory = memory_of(frame)
    if len(memory) < SEEDS_HEADER_BYTES:
        raise FrameError(f"frame of {len(memory)} bytes is shorter than its header")
    magic, steps, probes, rounds, first = _HEADER.unpack_from(memory)
    if magic != SEEDS_MAGIC:
        raise FrameError("not a frame of seeds: wrong magic")
    if problem := _problem(rounds, steps, probes, first):
        raise FrameError(problem)
    count = rounds * steps * probes
    if count > MOST_SCALARS:
        raise LimitError(f"frame of {count} scalars, {MOST_SCALARS} allowed")
    payload = memory[SEEDS_HEADER_BYTES:]
    if len(payload) != count * _SCALAR_BYTES:
        raise FrameError(f"frame of {len(payload)} bytes of scalars, {count} scalars announced")
    (checksum,) = _CHECKSUM.unpack_from(memory, _HEADER.size)
    if zlib.crc32(payload, zlib.crc32(memory[: _HEADER.size])) != checksum:
        raise FrameError("checksum does not match")
    scalars = np.frombuffer(payload, "<f4").astype(np.float32).reshape(rounds, steps, probes)
    return SeedsFrame(first, scalars)


def direction_keys(seed: int, first: int, rounds: int, steps: int, probes: int) -> Words:
    """The keys of all directions of `rounds` rounds from `first` on: uint64 (rounds * K * P, 2).

    In the order of the scalars of a frame. Key: seed, and round << 24 | step << 12 | probe.
    """
    numbers: npt.NDArray[np.uint64] = np.arange(first, first + rounds, dtype=np.uint64)
    high = numbers[:, None, None] << np.uint64(24)
    middle = np.arange(steps, dtype=np.uint64)[:, None] << np.uint64(12)
    streams = (high | middle | np.arange(probes, dtype=np.uint64)).reshape(-1)
    return np.stack((np.full(len(streams), seed & (1 << 64) - 1, np.uint64), streams), axis=1)


__all__ = [
    "MOST_SCALARS",
    "SEEDS_HEADER_BYTES",
    "SEEDS_MAGIC",
    "SeedsFrame",
    "decode_seeds",
    "direction_keys",
    "encode_seeds",
    "is_seeds",
]

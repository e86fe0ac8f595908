"""Writes and reads an inner block's scales (docs/WIRE.md, "Scales on the wire").

They are bit planes, or ranks by the distance from the most frequent scale.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from . import uniform
from .bitplanes import read_planes, read_ranks, write_planes, write_ranks
from .errors import FrameError
from .formats import ByteArray, Format
from .reader import Reader

ScaleArray = npt.NDArray[np.int64]

UPWARD: Final = 0x40
DOWNWARD: Final = 0x80
"""Added to the last rank, the form of scales as ranks; smaller forms are widths of bit planes."""
_LAST_RANK: Final = 15
_WIDEST_RANGE: Final = 7
"""Scales that differ by more are bit planes."""
_WIDEST_FLOAT8: Final = 8
_WIDEST_UNIFORM: Final = 10


def write_scales(scales: ScaleArray, number_format: Format, pieces: list[bytes]) -> None:
    """Append the scales (runs,) of an inner block of 8-bit codes.

    The form is the one of fewer bytes, bit planes if equal.
    """
    base_bytes = 1 if number_format.float8 is not None else 2
    smallest, largest = int(scales.min()), int(scales.max())
    width = (largest - smallest).bit_length()
    if 0 < largest - smallest <= _WIDEST_RANGE:
        common = smallest + int(np.bincount(scales - smallest).argmax())
        is_upward = np.count_nonzero(scales > common) >= np.count_nonzero(scales < common)
        ranks = _ranks(scales - common if is_upward else common - scales)
        last = int(ranks.max())
        written: list[bytes] = []
        write_ranks(ranks, last, written)
        if len(written[0]) < width * -(-scales.size // 8):
            pieces.append(common.to_bytes(base_bytes, "little"))
            pieces.append(bytes(((UPWARD if is_upward else DOWNWARD) + last,)))
            pieces += written
            return
    pieces.append(smallest.to_bytes(base_bytes, "little"))
    pieces.append(bytes((width,)))
    differences = scales - smallest
    if width > 8:
        write_planes((differences >> 8).astype(np.uint8), width - 8, pieces)
    write_planes((differences & 0xFF).astype(np.uint8), min(width, 8), pieces)


def read_scales(reader: Reader, number_format: Format, runs: int) -> ScaleArray:
    """The scales (runs,) that `write_scales` wrote; FrameError for impossible ones."""
    if number_format.float8 is not None:
        lowest, highest = number_format.float8.lowest_scale, number_format.float8.highest_scale
        base, widest = reader.byte(), _WIDEST_FLOAT8
    else:
        lowest = uniform.LOWEST_STEP + uniform.STEP_OFFSET
        highest = uniform.HIGHEST_STEP + uniform.STEP_OFFSET
        base, widest = reader.number(2), _WIDEST_UNIFORM
    form = reader.byte()
    if form <= widest:
        scales = np.full(runs, base, dtype=np.int64)
        if form > 8:
            scales += read_planes(reader, runs, form - 8).astype(np.int64) << 8
        scales += read_planes(reader, runs, min(form, 8))
    elif UPWARD < form <= UPWARD + _LAST_RANK:
        scales = base + _differences(read_ranks(reader, runs, form - UPWARD))
    elif DOWNWARD < form <= DOWNWARD + _LAST_RANK:
        scales = base - _differences(read_ranks(reader, runs, form - DOWNWARD))
    else:
        raise FrameError(f"unknown form of scales {form}")
    if int(scales.min()) < lowest or int(scales.max()) > highest:
        raise FrameError(f"a scale is not from {lowest} to {highest}")
    return scales


def _ranks(differences: ScaleArray) -> ByteArray:
    """0, 1, -1, 2, -2, ... as 0, 1, 2, 3, 4, ..."""
    return np.where(differences > 0, 2 * differences - 1, -2 * differences).astype(np.uint8)


def _differences(ranks: ByteArray) -> ScaleArray:
    """The inverse of `_ranks`."""
    ways = (ranks.astype(np.int64) + 1) // 2
    return np.where(ranks % 2 == 1, ways, -ways)

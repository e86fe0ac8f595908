"""Tensors from safetensors files that the user names, as one flat fp32 vector.

The layout is in `fsl_async.store.flat_file`, from the safetensors README. Only types that fp32
holds without loss are read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_LONGEST_HEADER_BYTES = 100_000_000
_VALUE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def read_values(path: Path, at_most: int) -> NDArray[np.float32]:
    """The first finite values (n,), n <= at_most, of the file's F32, BF16 and F16 tensors.

    In the order of their bytes. Raises UsageError for any other file.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f"--tensors {path}: {getattr(error, 'strerror', None) or error}") from None
    found = np.empty(at_most, dtype=np.float32)
    filled = 0
    for begin, end, kind in _entries(data, path):
        raw = data[begin : min(end, begin + (at_most - filled) * _VALUE_BYTES[kind])]
        values = _as_float32(raw, kind)
        found[filled : filled + values.size] = values
        filled += values.size
    finite = found[:filled]
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        raise UsageError(f"--tensors {path}: no F32, BF16 or F16 values in it")
    return finite


def _entries(data: NDArray[np.uint8], path: Path) -> list[tuple[int, int, str]]:
    """Begin, end and type of the tensors that we read, in this order, counted from byte 0."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= min(_LONGEST_HEADER_BYTES, data.size - 8):
        raise _not_safetensors(path, f"a header of {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        found = [
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]), str(entry["dtype"]))
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in _VALUE_BYTES
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _not_safetensors(path, str(error)) from None
    room = data.size - 8 - length
    if any(not 0 <= begin <= end <= room for begin, end, _ in found):
        raise _not_safetensors(path, "a tensor lies outside of the file")
    return [(8 + length + begin, 8 + length + end, kind) for begin, end, kind in sorted(found)]


def _not_safetensors(path: Path, why: str) -> UsageError:
    return UsageError(f"--tensors {path}: not a safetensors file ({why})")


def _as_float32(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    size = _VALUE_BYTES[kind]
    content = raw[: raw.size // size * size].tobytes()
    if kind == "BF16":
        return (np.frombuffer(content, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(content, "<f4" if kind == "F32" else "<f2").astype(np.float32)

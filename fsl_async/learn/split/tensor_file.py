"""Named tensors of any dtype as a safetensors file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fsl_async.files.files import BytesLike
from fsl_async.files.safetensors_header import header_of, read_header

_TYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[BytesLike]:
    """Yield the file piece by piece; contiguous tensors on the CPU are not copied.

    Raises KeyError for a dtype that has no name here.
    """
    yield header_of(
        (name, _NAMES[one.dtype], one.shape, one.nbytes) for name, one in tensors.items()
    )
    for one in tensors.values():
        if one.numel():
            flat: Any = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(flat)


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file. Raises KeyError, TypeError, ValueError for anything else."""
    entries, start = read_header(io.BytesIO(data).read)
    raw = torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8)
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        # A copy, because a view of another dtype must begin at a multiple of its size.
        found[name] = raw[begin:end].clone().view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found

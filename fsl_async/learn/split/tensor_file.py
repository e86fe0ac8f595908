"""Named tensors of any dtype as a safetensors file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsl_async.files.files import BytesLike, Files
from fsl_async.files.safetensors_header import header_of, read_header
from fsl_async.store.folders import write_pieces

Tensors: TypeAlias = Mapping[str, Tensor]

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


def write_tensors(files: Files, path: Path, tensors: Tensors) -> str:
    """Write a file, not synced; return its digest. Contiguous tensors on the CPU are not copied.

    Raises OSError, and KeyError for a dtype that has no name here.
    """
    return write_pieces(files, path, _pieces(tensors))


def _pieces(tensors: Tensors) -> Iterator[BytesLike]:
    yield header_of(
        (name, _NAMES[one.dtype], one.shape, one.nbytes) for name, one in tensors.items()
    )
    for one in tensors.values():
        if one.numel():
            flat: Any = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(flat)


def read_tensors(files: Files, path: Path) -> dict[str, Tensor]:
    """Read a file. Raises OSError; KeyError, TypeError or ValueError for anything else."""
    data = files.read_whole(path, files.size_at(path))
    entries, start = read_header(io.BytesIO(data).read)
    raw = torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8)
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        # A copy, because a view of another dtype must begin at a multiple of its size.
        found[name] = raw[begin:end].clone().view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found

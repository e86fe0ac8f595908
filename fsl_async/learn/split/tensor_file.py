"""Named tensors of any dtype as a safetensors file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsl_async.files.files import Files
from fsl_async.files.safetensors_header import header_of, read_header

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


def write_tensors(files: Files, path: Path, tensors: Tensors) -> None:
    """Write a file, not synced. Contiguous tensors on the CPU are not copied.

    Raises OSError, and KeyError for a dtype that has no name here.
    """
    header = header_of((name, _NAMES[x.dtype], x.shape, x.nbytes) for name, x in tensors.items())
    with files.created(path) as descriptor:
        files.write(descriptor, header, 0)
        offset = len(header)
        for one in tensors.values():
            flat: Any = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            if one.nbytes:  # no view has zero bytes
                files.write(descriptor, memoryview(flat), offset)
            offset += one.nbytes


def read_tensors(files: Files, path: Path) -> dict[str, Tensor]:
    """Read a file. Raises OSError; KeyError, TypeError or ValueError for anything else."""
    data = files.read_whole(path, files.size_at(path))
    entries, start = read_header(io.BytesIO(data).read)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:]
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        # A copy, because a view of another dtype must begin at a multiple of its size.
        found[name] = raw[begin:end].clone().view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found

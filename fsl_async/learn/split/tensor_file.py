"""Named tensors as one file in the safetensors layout, which that library opens.

8 bytes of header length, JSON, the data.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: kind for kind, name in _NAMES.items()}


def write_tensors(tensors: Mapping[str, Tensor], write: Callable[[memoryview], None]) -> None:
    """Give the file to `write`, piece by piece in order; contiguous tensors are not copied.

    Tensors are on the CPU. Raises KeyError for a dtype that has no name here.
    """
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    write(memoryview(struct.pack("<Q", len(head)) + head))
    for tensor in tensors.values():
        if tensor.numel():
            flat = tensor.detach().contiguous().reshape(-1)
            found: Any = flat.view(torch.uint8).numpy()
            write(memoryview(found))


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """Read it back. Raises KeyError, TypeError or ValueError for anything else."""
    if len(data) < 8:
        raise ValueError("shorter than a header")
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        kind = _TYPES[entry["dtype"]]
        if not stop > start:
            found[name] = torch.empty(entry["shape"], dtype=kind)
            continue
        raw = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8)
        found[name] = raw.view(kind).reshape(entry["shape"])
    return found

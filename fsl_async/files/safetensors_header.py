"""The header of a safetensors file, from the library's README, section "Format"
(https://github.com/huggingface/safetensors#format). Pure.

    8 bytes    N, the length of the header, unsigned little-endian
    N bytes    JSON: {"name": {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...,
               "__metadata__": {...}}; begins with "{", may end in spaces; offsets count bytes from
               the end of the header
    the rest   the tensors' bytes, little-endian, row-major, without holes

The library is not used because it needs all tensors in memory at once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MOST_HEADER_BYTES = 100 << 20
"""The format's own limit."""
_ALIGNMENT_BYTES = 64
"""The data begins at a multiple of it, so that a reader can map it aligned."""


def header_of(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Return the length field and the JSON. tensors: name, dtype, shape and bytes, in order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def read_header(read: Callable[[int], bytes]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries by name, and where the data begins. Raises ValueError, TypeError.

    read: returns the next so many bytes of the file, fewer at its end.
    """
    size = int.from_bytes(read(8), "little")
    entries = json.loads(read(min(size, MOST_HEADER_BYTES)))
    if not isinstance(entries, dict):
        raise TypeError("it is no JSON object")
    entries.pop("__metadata__", None)
    return entries, 8 + size

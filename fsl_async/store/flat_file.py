"""Flat files: a vector of fp32 values as a safetensors file, written and read chunk by chunk.

The layout is from the safetensors README, section "Format"
(https://github.com/huggingface/safetensors#format):

    8 bytes    N, the length of the header, unsigned little-endian
    N bytes    JSON: {"name": {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...,
               "__metadata__": {...}}; begins with "{", may end in spaces; offsets count bytes from
               the end of the header
    the rest   the tensors' bytes, little-endian, row-major, without holes

A checkpoint's weights therefore open in the safetensors library and everything built on it. The
library is not used here because it needs all tensors in memory at once; a flat vector in the
manifest's order already is the data part. The header is padded so that the data begins at a
multiple of 64 bytes, which lets a reader map it aligned.

A flat file has a checksum per chunk, which is checked when the chunk is read, and one digest
(fsl_async.store.digest). Both are kept in the version's manifest.json.

The header follows from the manifest alone, so a reader compares it byte by byte, and the digest is
that of the vector: for weights.safetensors the one that the nodes of a version compare.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from fsl_async.store.digest import (
    DIGEST_CHARACTERS,
    check_chunk,
    check_of,
    chunk_digest,
    vector_digest,
)
from fsl_async.store.errors import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.store.files import Files
    from fsl_async.store.manifest import Manifest

VALUE_BYTES = 4
_ALIGNMENT_BYTES = 64


def header_for(manifest: Manifest) -> bytes:
    """Return the length field and the JSON header of `manifest`'s flat file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in manifest.tensors:
        begin = tensor.offset * VALUE_BYTES
        entries[tensor.name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.values * VALUE_BYTES],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


class FlatWriter:
    """Writes a flat file from first to last value, and computes its digest. Always close it."""

    def __init__(self, files: Files, path: Path, manifest: Manifest) -> None:
        self._files = files
        self._offset = self._synced = 0
        self._digests: list[bytes] = []
        self._descriptor = files.create(path)
        header = header_for(manifest)
        try:
            files.write(self._descriptor, header, 0)
        except BaseException:
            files.close(self._descriptor)
            raise
        self._offset = len(header)

    def append(self, values: NDArray[np.float32]) -> None:
        """Write the next chunk: float32, one-dimensional, contiguous."""
        little = values.astype("<f4", copy=False)
        self._files.write(self._descriptor, little.data.cast("B"), self._offset)
        self._digests.append(chunk_digest(values))
        self._offset += little.nbytes

    @property
    def digest(self) -> str:
        """The digest of the values so far that nodes compare."""
        return vector_digest(self._digests)[:DIGEST_CHARACTERS]

    @property
    def checks(self) -> str:
        """The checksums of the chunks so far."""
        return "".join(map(check_of, self._digests))

    def sync_some(self, least_bytes: int) -> None:
        """Make durable what is not, if it is so much, and keep it out of the page cache."""
        if self._offset - self._synced >= least_bytes:
            self._files.sync_past_cache(self._descriptor, self._synced, self._offset)
            self._synced = self._offset

    def sync(self) -> tuple[int, str]:
        """Make the content durable; return the file's bytes and the digest of the vector."""
        self._files.sync(self._descriptor)
        return self._offset, vector_digest(self._digests)

    def close(self) -> None:
        """Close the descriptor."""
        self._files.close(self._descriptor)


class FlatReader:
    """Reads and checks chunks of a flat file with known manifest and checksums.

    Raises Damage, OSError.
    """

    def __init__(self, files: Files, path: Path, manifest: Manifest, checks: str) -> None:
        self._files = files
        self._path = path
        self._manifest = manifest
        self._checks = checks
        header = header_for(manifest)
        self._data_at = len(header)
        try:
            self._descriptor = files.open_existing(path)
        except FileNotFoundError:
            raise Damage(path.name, "is missing") from None
        if files.read(self._descriptor, len(header), 0) != header:
            self.close()
            raise Damage(path.name, "has a wrong header")

    def read_into(self, index: int, out: NDArray[np.float32]) -> None:
        """Read chunk `index` into `out`, which has its length."""
        start, _ = self._manifest.chunk_range(index)
        view = out.data.cast("B")
        filled = self._files.read_into(self._descriptor, view, self._data_at + start * VALUE_BYTES)
        if filled != len(view):
            raise Damage(self._path.name, f"ends before chunk {index}")
        check_chunk(self._path.name, self._checks, index, view)
        if sys.byteorder == "big":
            out.byteswap(inplace=True)

    def close(self) -> None:
        """Close the descriptor."""
        self._files.close(self._descriptor)


def check_flat_file(
    files: Files, path: Path, manifest: Manifest, size: int, digest: str
) -> str | None:
    """Return what is wrong with a flat file, or None. Reads it in chunks."""
    header = header_for(manifest)
    if size != len(header) + manifest.values * VALUE_BYTES:
        return "is listed with a length that does not fit the model"
    found: list[bytes] = []
    take: Callable[[memoryview], Any] = lambda piece: found.append(blake3(piece).digest())  # noqa: E731
    lengths = [manifest.chunk_values(index) * VALUE_BYTES for index in range(manifest.chunks)]
    problem = _read(files, path, size, header, lengths=lengths, take=take)
    return problem or (None if vector_digest(found) == digest else "does not match its digest")


def _read(
    files: Files,
    path: Path,
    size: int,
    head: bytes = b"",
    *,
    lengths: Sequence[int],
    take: Callable[[memoryview], Any],
) -> str | None:
    """Give the bytes behind `head` to `take` in these lengths; return what is wrong, or None."""
    try:
        descriptor = files.open_existing(path)
    except FileNotFoundError:
        return "is missing"
    try:
        if files.size(descriptor) != size:
            return f"has {files.size(descriptor)} bytes instead of {size}"
        if files.read(descriptor, len(head), 0) != head:
            return "has a wrong header"
        view = memoryview(bytearray(max(lengths)))
        offset = len(head)
        for count in lengths:
            if files.read_into(descriptor, view[:count], offset) != count:
                return "ended while it was read"
            take(view[:count])
            offset += count
    finally:
        files.close(descriptor)
    return None

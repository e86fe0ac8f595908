"""Flat files: a vector of fp32 values as a safetensors file, written and read chunk by chunk.

A checkpoint's weights therefore open in the safetensors library and everything built on it: a flat
vector in the manifest's order is the data part of such a file.

A flat file has a checksum per chunk, which is checked when the chunk is read, and one digest
(fsl_async.store.digest). Both are kept in the version's manifest.json.

The header follows from the manifest alone, so a reader compares it byte by byte, and the digest is
that of the vector: for weights.safetensors the one that the nodes of a version compare.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.files.safetensors_header import header_of
from fsl_async.store.digest import (
    DIGEST_CHARACTERS,
    check_chunk,
    check_of,
    chunk_digest,
    vector_digest,
)
from fsl_async.store.errors import Damage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.manifest import Manifest

VALUE_BYTES = 4


def header_for(manifest: Manifest) -> bytes:
    """Return the length field and the JSON header of `manifest`'s flat file."""
    return header_of(
        (tensor.name, "F32", tensor.shape, tensor.values * VALUE_BYTES)
        for tensor in manifest.tensors
    )


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


def fits(files: Files, descriptor: int, manifest: Manifest) -> str | None:
    """Return why an open file is no flat file of the model, by its length and header, or None."""
    header = header_for(manifest)
    size = len(header) + manifest.values * VALUE_BYTES
    if files.size(descriptor) != size:
        return f"has {files.size(descriptor)} bytes instead of {size}"
    return None if files.read(descriptor, len(header), 0) == header else "has a wrong header"


def chunks_of(
    files: Files, descriptor: int, manifest: Manifest, first: int = 0
) -> Iterator[NDArray[np.float32]]:
    """Yield the chunks of an open file that `fits`, each valid until the next; unchecked."""
    data_at = len(header_for(manifest))
    buffer = np.empty(manifest.longest_chunk, np.dtype("<f4"))
    for index in range(first, manifest.chunks):
        start, stop = manifest.chunk_range(index)
        values = buffer[: stop - start]
        files.read_into(descriptor, values.data.cast("B"), data_at + start * VALUE_BYTES)
        yield values


def check_flat_file(
    files: Files, path: Path, manifest: Manifest, size: int, digest: str
) -> str | None:
    """Return what is wrong with a flat file, or None. Reads it in chunks."""
    if size != len(header_for(manifest)) + manifest.values * VALUE_BYTES:
        return "is listed with a length that does not fit the model"
    try:
        with files.opened(path) as descriptor:
            problem = fits(files, descriptor, manifest)
            if problem is None:
                found = vector_digest(map(chunk_digest, chunks_of(files, descriptor, manifest)))
                problem = None if found == digest else "does not match its digest"
            return problem
    except FileNotFoundError:
        return "is missing"

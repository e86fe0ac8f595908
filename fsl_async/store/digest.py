"""Digests: BLAKE3 (O'Connor et al., 2020, https://github.com/BLAKE3-team/BLAKE3-specs). Pure.

    of a chunk      BLAKE3 of its values as little-endian fp32
    of a vector     BLAKE3 of the digests of its chunks, one after the other

So chunks may be hashed in any order, by several threads, each where it is in the cache anyway, and
the beginning of a chunk's digest is also the checksum by which the chunk is checked when it is read
alone. Nodes of a run compare digests of whole vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from fsl_async.store import manifest
from fsl_async.store.errors import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

DIGEST_CHARACTERS = 32
"""Of a version's digest, of the 64 that BLAKE3 has."""

CHECK_CHARACTERS = 8
"""Of a chunk's digest, where it serves as a checksum."""


def chunk_digest(values: NDArray[np.float32]) -> bytes:
    """Return the digest of a chunk: float32, contiguous. 32 bytes. Releases the GIL."""
    return blake3(values.astype("<f4", copy=False).data.cast("B")).digest()


def vector_digest(chunks: Iterable[bytes]) -> str:
    """Return the digest of a vector by those of all its chunks, in order: 64 hex characters."""
    return blake3(b"".join(chunks)).hexdigest()


def digest_of(
    values: NDArray[np.float32],
    each: Callable[..., Iterable[bytes]] = map,
    *,
    weights: int | None = None,
) -> str:
    """Return the digest that nodes compare: 32 characters.

    values: a flat vector, float32, contiguous. each: `map`, or one on several threads. weights: how
    many of the values are weights; buffers follow, in chunks of their own. None: all.
    """
    step = manifest.CHUNK_VALUES
    kinds = (values[:weights], values[len(values) if weights is None else weights :])
    parts = (kind[at : at + step] for kind in kinds for at in range(0, len(kind), step))
    return vector_digest(each(chunk_digest, parts))[:DIGEST_CHARACTERS]


def check_of(digest: bytes) -> str:
    """Return the checksum that a chunk's digest gives."""
    return digest[: CHECK_CHARACTERS // 2].hex()


def check_chunk(name: str, checks: str, index: int, data: memoryview | bytes) -> None:
    """Compare chunk `index` of the file `name` with its checksum. Raises Damage.

    checks: CHECK_CHARACTERS for every chunk.
    """
    expected = checks[index * CHECK_CHARACTERS : (index + 1) * CHECK_CHARACTERS]
    if check_of(blake3(data).digest()) != expected:
        raise Damage(name, f"does not match the checksum of chunk {index}")

"""Digests of vectors: by chunks, in any order, the same on every machine."""

import numpy as np
import pytest
from blake3 import blake3

from fsl_async.store.disk.chunk_files import (
    check_chunk,
    check_of,
    chunk_digest,
    digest_of,
    vector_digest,
)
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.errors import Damage
from fsl_async.store.model.manifest import CHUNK_VALUES


def test_a_vectors_digest_is_that_of_its_chunks_digests():
    """Other programs can check a version: two lines of BLAKE3 over little-endian fp32."""
    values = np.arange(2 * CHUNK_VALUES + 5, dtype=np.float32)
    values[3] = -0.0
    data = values.astype("<f4").tobytes()
    step = 4 * CHUNK_VALUES
    parts = [blake3(data[at : at + step]).digest() for at in range(0, len(data), step)]
    assert len(parts) == 3
    assert digest_of(values) == blake3(b"".join(parts)).hexdigest()[:32]
    assert digest_of(values.astype(">f4").view(values.dtype.newbyteorder(">"))) == digest_of(values)
    assert vector_digest(parts)[:32] == digest_of(values)


def test_known_digests_do_not_change():
    """Runs and nodes of another release compare them."""
    assert digest_of(np.zeros(0, np.float32)) == "af1349b9f5f9a1a6a0404dea36dcc949"
    assert digest_of(np.ones(1, np.float32)) == blake3(blake3(b"\0\0\x80?").digest()).hexdigest(
        length=16
    )


def test_several_threads_give_the_same_digest():
    """The order of the chunks counts, not that of the work."""
    values = np.random.default_rng(0).standard_normal(9 * CHUNK_VALUES).astype(np.float32)
    pool = ChunkPool(3)
    try:
        assert digest_of(values, pool.each) == digest_of(values)
    finally:
        pool.close()
    swapped = values.copy()
    swapped[0], swapped[1] = values[1], values[0]
    assert digest_of(swapped) != digest_of(values)
    assert digest_of(np.roll(values, CHUNK_VALUES)) != digest_of(values)


def test_a_chunk_is_checked_by_the_beginning_of_its_digest():
    """Chunks are read alone."""
    chunks = [np.full(4, value, np.float32) for value in (1.0, 2.0)]
    checks = "".join(check_of(chunk_digest(one)) for one in chunks)
    for index, one in enumerate(chunks):
        check_chunk("weights", checks, index, one.tobytes())
    with pytest.raises(Damage, match="checksum of chunk 1"):
        check_chunk("weights", checks, 1, chunks[0].tobytes())
    with pytest.raises(Damage, match="checksum of chunk 2"):
        check_chunk("weights", checks, 2, chunks[0].tobytes())

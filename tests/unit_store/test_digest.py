"""Digests of vectors: by chunks, in any order, the same on every machine."""

import numpy as np
import pytest
from blake3 import blake3

from fsl_async.store.disk.chunk_files import (
    check_chunk,
    check_of,
    chunk_digest,
    digest_of,
)
from fsl_async.store.errors import Damage


def test_known_digests_do_not_change():
    """Runs and nodes of another release compare them."""
    assert digest_of(np.zeros(0, np.float32)) == "af1349b9f5f9a1a6a0404dea36dcc949"
    assert digest_of(np.ones(1, np.float32)) == blake3(blake3(b"\0\0\x80?").digest()).hexdigest(
        length=16
    )


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

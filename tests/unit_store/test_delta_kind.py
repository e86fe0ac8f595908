"""Kinds of deltas: decoded once on arrival, the same bits later."""

import numpy as np
import pytest
from deltas import delta_of

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store import delta_kind
from fsl_async.store.delta_kind import Dense, FullWeights
from fsl_async.store.manifest import Manifest
from fsl_codecs import CodecSpec, encode

CHUNK = 20

MANIFEST = Manifest.from_shapes([("w", (50,))])
KEYS = [DeltaKey(name, 1, 0, 1) for name in "ab"]


# --- dense and full ---


@pytest.mark.parametrize("kind", [Dense(), FullWeights()])
@pytest.mark.parametrize("spec", [CodecSpec("fp32"), CodecSpec("e4m3"), CodecSpec("uniform")])
@pytest.mark.parametrize("weight", [0.0, 1.0, 0.3, 1e-42, 1e30])
def test_a_checked_frame_and_its_bytes_add_the_same_bits(kind, spec, weight):
    """A restart reads from the spool what was added on arrival: the version must not change."""
    random = np.random.default_rng(1)
    values = random.standard_normal(20).astype(np.float32)
    values[:5] *= np.float32(1e-40)
    values[5] = -0.0
    frame = encode(values, spec)
    arrived, read = kind.total(MANIFEST), kind.total(MANIFEST)
    for total in (arrived, read):
        total.values[:20] = values[::-1]
    assert arrived.add(0, kind.check(MANIFEST, 0, frame).content, weight)
    read.add_frame(0, frame, weight)
    assert arrived.values.tobytes() == read.values.tobytes()


def test_an_arriving_chunk_is_decoded_once(make_run, monkeypatch):
    """Check and addition share the result: decoding is most of the ps's work for a chunk."""
    decoded = []
    for name in ("decode_into", "decode_accumulate"):
        real = getattr(delta_kind, name)
        monkeypatch.setattr(
            delta_kind, name, lambda *given, real=real: (decoded.append(1), real(*given))[1]
        )
    run = make_run(manifest=MANIFEST)
    run.start()
    decoded.clear()
    key = KEYS[0]
    assert run.store.spool_begin(delta_of(key), 10.0) is None
    for index in range(MANIFEST.chunks):
        start, stop = MANIFEST.chunk_range(index)
        frame = encode(np.ones(stop - start, np.float32), CodecSpec("e4m3"))
        run.store.spool_write(key, index, frame)
    run.store.spool_finish(key)
    assert len(decoded) == MANIFEST.chunks


# --- another kind ---

"""Versions in transfer to a client: base and digest are the version's to the bit, or unchanged."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_async.learn.client import fetching
from fsl_async.learn.client.fetching import Fetch
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.errors import LearnerError
from fsl_async.store.model import manifest as manifest_module
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, decode, encode

CHUNK = 20
CHUNKS = 4
MANIFEST = Manifest.from_shapes([("w", (CHUNKS * CHUNK - 7,))])
FP32, DOWN = CodecSpec(format="fp32"), CodecSpec(format="e4m3")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", CHUNK)


def vector(seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(MANIFEST.values).astype(np.float32)
    values[rng.random(len(values)) < 0.1] *= np.float32(-0.0)
    values[:CHUNK] *= np.float32(1e-38)
    return values


def frames(values, spec):
    return [encode(values[start : start + CHUNK], spec) for start in range(0, len(values), CHUNK)]


def added(base, coded):
    return base + np.concatenate([decode(frame) for frame in coded])


def same(found, expected):
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def begun(kind, base):
    if kind == "update":
        coded = frames(vector(1), DOWN)
        return Fetch(MANIFEST, 1, base=base), coded, added(base, coded)
    return Fetch(MANIFEST, 1, target=np.full_like(base, np.nan)), frames(vector(1), FP32), vector(1)


@pytest.mark.parametrize("kind", ["update", "full"])
@given(order=st.permutations(range(CHUNKS)))
@settings(max_examples=24, deadline=None, suppress_health_check=list(HealthCheck))
def test_chunks_may_come_in_any_order(kind, order):
    """Each is hashed when it comes; the digest is over all in their order."""
    base = vector(0)
    fetch, coded, expected = begun(kind, base)
    for done, index in enumerate(order):
        assert fetch.missing == CHUNKS - done
        fetch.put(index, coded[index])
    assert same(base, vector(0))
    new = np.full_like(base, np.nan) if fetch.target is None else fetch.target
    fetch.write_to(new, ChunkPool())
    assert same(new, expected)
    assert fetch.digest == digest_of(expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_update_adds_to_weights_and_replaces_buffers(in_place):
    """Frames of buffers are the buffers themselves: added, a variance would double each round."""
    model = Manifest.from_shapes([("w", (25,))], [("var", (23,))])
    base, sent = vector(0)[:48], vector(1)[:48]
    expected = np.concatenate([base[:25] + sent[:25], sent[25:]])
    fetch = Fetch(model, 1, base=base)
    assert fetch.chunks == 4
    for index in range(fetch.chunks):
        fetch.put(index, encode(sent[slice(*model.chunk_range(index))], FP32))
    assert fetch.digest == digest_of(expected, weights=25)
    new = base if in_place else np.full_like(base, np.nan)
    fetch.write_to(new, ChunkPool())
    assert same(new, expected)


@pytest.mark.parametrize("kind", ["update", "full"])
def test_nothing_is_left_to_hash_when_the_last_chunk_is_here(monkeypatch, kind):
    """Otherwise hashing is nine tenths of the work after the last chunk."""
    hashed = []
    original = fetching.chunk_digest

    def counted(values):
        hashed.append(len(values))
        return original(values)

    monkeypatch.setattr(fetching, "chunk_digest", counted)
    fetch, coded, expected = begun(kind, vector(0))
    sizes = [len(decode(frame)) for frame in coded]
    for index in range(CHUNKS):
        fetch.put(index, coded[index])
        assert hashed == sizes[: index + 1]
    fetch.write_to(np.empty_like(expected) if fetch.target is None else fetch.target, ChunkPool())
    assert fetch.digest == digest_of(expected)
    assert hashed == sizes


@pytest.mark.parametrize("kind", ["update", "full"])
def test_a_refused_chunk_changes_nothing(kind):
    """The stream is sent again from the refused chunk, which must not be in the digest."""
    fetch, coded, expected = begun(kind, vector(0))
    for index in range(CHUNKS):
        damaged = bytearray(coded[index])
        damaged[-1] ^= 1
        short = encode(np.ones(3, np.float32), FP32)
        for bad, text in (
            (bytes(damaged), "cannot be decoded"),
            (b"", "cannot be decoded"),
            (short, "has 3 values"),
        ):
            with pytest.raises(LearnerError, match=text):
                fetch.put(index, bad)
        assert fetch.missing == CHUNKS - index
        fetch.put(index, coded[index])
        fetch.put(index, coded[index])
        fetch.put(index, b"not looked at")
    for index in (-1, CHUNKS):
        with pytest.raises(LearnerError, match="no chunk"):
            fetch.put(index, coded[0])
    new = np.empty_like(expected) if fetch.target is None else fetch.target
    fetch.write_to(new, ChunkPool())
    assert same(new, expected)
    assert fetch.digest == digest_of(expected)

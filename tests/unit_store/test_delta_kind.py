# ruff: noqa: D102 - the methods of the stand-in are those of DeltaKind
"""Kinds of deltas: decoded once on arrival, the same bits later, and a kind without chunks."""

import json
import math

import numpy as np
import pytest
from deltas import delta_of, merged_of

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store import delta_kind
from fsl_async.store import manifest as manifest_module
from fsl_async.store.aggregation import rule_named
from fsl_async.store.delta_kind import Checked, DeltaKind, Dense, FullWeights, Total
from fsl_async.store.errors import FrameRefused
from fsl_async.store.manifest import Manifest
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import StoreSettings
from fsl_codecs import CodecSpec, encode

MANIFEST = Manifest.from_shapes([("w", (50,))])
KEYS = [DeltaKey(name, 1, 0, 1) for name in "ab"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", 20)


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
    run.store.accumulate(key, 10.0)
    assert len(decoded) == MANIFEST.chunks


# --- another kind ---


def direction(seed, values):
    return np.random.default_rng(seed).standard_normal(values).astype(np.float32)


class SeedsTotal(Total):
    """The (seed, scalar) pairs so far; the vectors are generated in `chunks`."""

    def __init__(self, manifest):
        self.manifest = manifest
        self.pairs = []

    def clear(self, index):
        self.pairs.clear()

    def add(self, index, content, weight):
        self.pairs += [(seed, weight * scalar) for seed, scalar in content]
        return True

    def add_frame(self, index, frame, weight, clip=1.0):
        self.add(index, json.loads(bytes(frame)), weight)

    def chunks(self):
        for index in range(self.manifest.chunks):
            start, stop = self.manifest.chunk_range(index)
            total = np.zeros(stop - start, np.float32)
            for seed, scalar in self.pairs:
                total += np.float32(scalar) * direction(seed, self.manifest.values)[start:stop]
            yield total


class Seeds(DeltaKind):
    """A zeroth-order client's delta: one frame of (seed, scalar) pairs."""

    name = "seeds"

    def frames(self, manifest):
        return 1

    def check(self, manifest, index, frame):
        try:
            pairs = [(int(seed), float(scalar)) for seed, scalar in json.loads(bytes(frame))]
        except (ValueError, TypeError) as error:
            raise FrameRefused(f"not a list of seeds and scalars: {error}") from error
        return Checked(pairs, sum(scalar**2 for _, scalar in pairs))

    def total(self, manifest):
        return SeedsTotal(manifest)


@pytest.fixture
def seeds_run(make_run):
    """A run of seeds and scalars, at version 0."""
    outer = OuterSettings("average")
    run = make_run(
        manifest=MANIFEST, kind=Seeds(), outer=outer, codec_down=CodecSpec(format="fp32")
    )
    run.start()
    return run


def send(store, key, pairs, weight=None):
    assert store.spool_begin(delta_of(key), weight) is None
    store.spool_write(key, 0, json.dumps(pairs).encode())
    return store.spool_finish(key)


@pytest.mark.parametrize("early", [1.0, None])
@pytest.mark.parametrize("restarts", [False, True])
def test_another_kind_uses_the_common_path(seeds_run, early, restarts):
    """Spool, ledger, weights and restart are common: a kind adds check, size and accumulation."""
    run = seeds_run
    for key, pairs in zip(KEYS, ([[1, 0.5], [2, -1.0]], [[3, 2.0]]), strict=True):
        assert send(run.store, key, pairs, early).problem is None
        run.store.accumulate(key, 1.0)
    before = run.weights(0)
    if restarts:
        for stored in run.open().pending:
            run.store.accumulate(stored.key, 1.0)
    run.store.commit(1, [merged_of(key) for key in KEYS], 0.5)
    change = 0.5 * direction(1, 50) - 1.0 * direction(2, 50) + 2.0 * direction(3, 50)
    assert np.allclose(run.weights(1), before - 0.5 * change, atol=1e-6)
    path = run.store._parts.kept.get(1).path / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert not run.store.verify(1)
    assert np.allclose(run.weights(1), before - 0.5 * change, atol=1e-6), (
        "recomputed from the spool"
    )


def test_another_kind_has_its_own_check(seeds_run):
    """An invalid frame is refused; values that are not finite go to quarantine as always."""
    store = seeds_run.store
    store.spool_begin(delta_of(KEYS[0]))
    with pytest.raises(FrameRefused, match="not a list of seeds and scalars"):
        store.spool_write(KEYS[0], 0, b"[[1]]")
    assert store.spool_next_chunk(KEYS[0]) == 0
    assert send(store, KEYS[1], [[1, math.nan]]).problem == "it holds NaN or infinity"


def test_rules_that_compare_chunks_need_a_kind_with_chunks():
    """Seeds of two clients cannot be sorted by value."""
    with pytest.raises(ValueError, match="seeds deltas cannot be aggregated by median"):
        StoreSettings(rule=rule_named("median"), kind=Seeds())

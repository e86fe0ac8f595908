# ruff: noqa: D102 - the methods are the operations of a history, by name
"""Versions in transfer to a client: base and digest are the version's to the bit, or unchanged."""

import numpy as np
import pytest
import torch
from client_sides import Sides
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fsl_async.learn.client import fetching
from fsl_async.learn.client.fetching import Fetch
from fsl_async.store import manifest as manifest_module
from fsl_async.store.chunk_pool import ChunkPool
from fsl_async.store.digest import digest_of
from fsl_async.store.errors import LearnerError
from fsl_async.store.manifest import Manifest
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


def test_an_update_is_decoded_twice_and_a_full_version_once(monkeypatch):
    """No further pass is needed for the digest."""
    decoded = []
    for name in ("decode_into", "decode_accumulate"):
        original = getattr(fetching, name)

        def counted(frame, *others, original=original):
            decoded.append(frame)
            return original(frame, *others)

        monkeypatch.setattr(fetching, name, counted)
    for kind, times in (("update", 2), ("full", 1)):
        base = vector(0)
        fetch, coded, _ = begun(kind, base)
        decoded.clear()
        for index in range(CHUNKS):
            fetch.put(index, coded[index])
        fetch.write_to(base, ChunkPool())
        assert decoded == coded * times


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


OPERATIONS = (
    *("train", "snapshot", "code", "drop", "release", "update", "full", "rebase"),
    *("next", "next", "next", "put", "damaged", "short", "other", "skip", "rest", "finish"),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, CHUNKS - 1)), min_size=20, max_size=80
)


class Model(nn.Module):
    """One vector of weights."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(vector(0)))


class Client:
    """A learner, and copies of what each of its vectors has to hold."""

    def __init__(self, threads):
        self.versions, self.updates = [vector(0)], [[]]
        self.model = Model()
        self.sides = Sides(publishes=True)
        self.learner = self.sides.exchange
        self.learner.pool.threads = threads
        self.sides.training.attach(self.model)
        self.held = 0
        self.coming = None  # kind, version, frames, chunks received
        self.reference = vector(0)
        self.sequence = 0
        self.deltas = {}  # sequence -> minuend, subtrahend
        self.finished = 0

    def weights(self):
        return self.model.w.detach().numpy().copy()

    def apply(self, what, number):
        getattr(self, what)(number)
        learner = self.learner
        assert learner._base_version == self.held
        assert same(learner._base, self.versions[self.held])
        assert same(learner._reference, self.reference)
        for sequence, (minuend, subtrahend) in self.deltas.items():
            delta = learner._deltas[sequence]
            if delta.minuend is not None:
                assert same(delta.minuend, minuend)
                assert same(delta.subtrahend, subtrahend)

    def train(self, number):
        with torch.no_grad():
            self.model.w += number / 7

    def snapshot(self, _):
        self.sequence += 1
        self.learner.request_snapshot(self.sequence)
        self.sides.training.attend()
        self.deltas[self.sequence] = self.reference, self.weights()
        self.reference = self.weights()

    def code(self, index):
        if self.deltas:
            sequence = min(self.deltas)
            minuend, subtrahend = self.deltas[sequence]
            expected = frames(minuend - subtrahend, FP32)[index]
            assert self.learner.encode_delta(sequence, index) == expected

    def drop(self, _):
        if self.deltas:
            sequence = min(self.deltas)
            del self.deltas[sequence]
            self.learner.drop_delta(sequence)

    def release(self, number):
        """Make a version at the parameter server."""
        coded = frames(vector(10 * len(self.versions) + number), DOWN)
        self.updates.append(coded)
        self.versions.append(added(self.versions[-1], coded))

    def update(self, _):
        version = self.held + 1
        if version < len(self.versions):
            self.learner.begin_fetch("update", version)
            self.coming = "update", version, self.updates[version], set()

    def full(self, number):
        version = max(0, len(self.versions) - 1 - number)
        self.learner.begin_fetch("full", version)
        self.coming = "full", version, frames(self.versions[version], FP32), set()

    def put(self, index):
        if self.coming is not None:
            _, version, coded, here = self.coming
            self.learner.put_fetch(version, index, coded[index])
            here.add(index)

    def next(self, _):
        if self.coming is not None and len(self.coming[3]) < CHUNKS:
            self.put(min(set(range(CHUNKS)) - self.coming[3]))

    def damaged(self, index):
        if self.coming is not None and index not in self.coming[3]:
            frame = bytearray(self.coming[2][index])
            frame[-1] ^= 1
            with pytest.raises(LearnerError):
                self.learner.put_fetch(self.coming[1], index, bytes(frame))

    def short(self, index):
        if self.coming is not None and index not in self.coming[3]:
            with pytest.raises(LearnerError):
                self.learner.put_fetch(self.coming[1], index, encode(np.ones(3, np.float32), DOWN))

    def other(self, index):
        """Feed a chunk of a version that is not being fetched."""
        version = 99 if self.coming is None else self.coming[1] + 1
        with pytest.raises(LearnerError, match="not being fetched"):
            self.learner.put_fetch(version, index, frames(vector(1), DOWN)[index])

    def skip(self, _):
        """Begin an update that does not follow: the present fetch is given up all the same."""
        with pytest.raises(LearnerError, match="in full"):
            self.learner.begin_fetch("update", self.held + 2)
        if self.coming is not None:
            with pytest.raises(LearnerError, match="not being fetched"):
                self.learner.finish_fetch(self.coming[1])
        self.coming = None

    def finish(self, _):
        if self.coming is None:
            return
        _, version, _, here = self.coming
        if len(here) < CHUNKS:
            with pytest.raises(LearnerError, match="lacks"):
                self.learner.finish_fetch(version)
            return
        assert self.learner.finish_fetch(version) == digest_of(self.versions[version])
        self.held, self.coming = version, None
        self.finished += 1

    def rest(self, number):
        for _ in range(CHUNKS):
            self.next(number)
        self.finish(number)

    def rebase(self, _):
        """Rebase, also during a fetch: the base is complete until the next version is."""
        before = self.learner.version, self.learner._model_digest
        digest = digest_of(self.versions[self.held])
        self.learner.request_rebase(self.held, digest)
        self.sides.training.attend()
        if before != (self.held, digest):
            self.reference = self.versions[self.held]


@pytest.mark.parametrize("threads", [1, 3])
@given(steps=STEPS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_only_a_complete_version_changes_a_vector(threads, steps):
    """Breaks, other versions, damage, chunks in any order; snapshots and rebases in between."""
    client = Client(threads)
    try:
        for step in [*steps, ("release", 0), ("update", 0), ("next", 0), ("rest", 0)]:
            client.apply(*step)
        assert client.finished
    finally:
        client.learner.pool.close()

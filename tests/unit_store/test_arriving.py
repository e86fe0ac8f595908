# ruff: noqa: D102 - the methods mirror those of Files, and the helpers are named after what they do
"""Deltas that are added while they arrive.

In every case the sum is, to the bit, that of the complete deltas in their order.
"""

import itertools
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from attrs import define
from deltas import delta_of, key, merged_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store import merge as merge_module
from fsl_async.store.aggregation import rule_named
from fsl_async.store.delta_kind import FullWeights
from fsl_async.store.errors import NoWorkerThread, StoreError
from fsl_async.store.manifest import Manifest
from fsl_async.store.outer import Average
from fsl_async.store.records import StoreSettings, file_name
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, decode, encode

CHUNK = 20
CHUNKS = 4
MANIFEST = Manifest.from_shapes([("w", (CHUNKS * CHUNK - 7,))])
UP = CodecSpec(format="e4m3")
FULL = {"outer": Average(), "kind": FullWeights()}


class Disk(Files):
    """Counts the bytes read of each file, and fails for the files in `unreadable`."""

    def __init__(self):
        self.reads = {}
        self.unreadable = set()
        self.sync_fails = False
        self._names = {}

    def open_existing(self, path, *, writable=False):
        if path.name in self.unreadable and not writable:
            raise OSError(5, "Input/output error", str(path))
        descriptor = super().open_existing(path, writable=writable)
        self._names[descriptor] = path.name
        return descriptor

    def read(self, descriptor, size, offset):
        data = super().read(descriptor, size, offset)
        name = self._names.get(descriptor, "")
        self.reads[name] = self.reads.get(name, 0) + len(data)
        return data

    def sync(self, descriptor):
        if self.sync_fails:
            raise OSError(28, "No space left on device")


def opened(root, **options):
    store = Store(root, StoreSettings(codec_down=CodecSpec(format="fp32"), **options), files=Disk())
    store.recover()
    store.begin_initial(MANIFEST)
    for index, frame in enumerate(frames(vector(0), CodecSpec())):
        store.write_initial(index, frame)
    store.finish_initial()
    return store


@pytest.fixture
def store(run_root):
    store = opened(run_root / "run")
    yield store
    store.close()


def vector(seed):
    random = np.random.default_rng(seed)
    values = random.standard_normal(MANIFEST.values).astype(np.float32)
    values[random.random(len(values)) < 0.1] *= np.float32(-0.0)
    values[:CHUNK] *= np.float32(1e-38)
    return values


def frames(values, spec=UP):
    return [encode(values[start : start + CHUNK], spec) for start in range(0, len(values), CHUNK)]


def begin(store, which, weight=3.0):
    assert store.spool_begin(delta_of(which), weight) is None


def write(store, which, seed, chunks):
    coded = frames(vector(seed))
    for index in chunks:
        store.spool_write(which, index, coded[index])


def sent(store, which, seed, weight=3.0):
    begin(store, which, weight)
    write(store, which, seed, range(CHUNKS))
    store.spool_finish(which)


def weights(store):
    """Return the complete deltas in the sum."""
    return getattr(store._open.merging.merge, "weights", {})


def raw(store):
    """Return the vector as it is now, including frames of an incomplete delta."""
    return np.concatenate(list(store._open.merging.merge.total.chunks()))


def sum_of(store):
    """Return the sum of the complete deltas in it."""
    return np.concatenate(list(store._open.merging.merge.chunks()))


def added(*members):
    """Return the sum of (seed, weight) members, added in order."""
    total = np.zeros(MANIFEST.values, np.float32)
    for seed, weight in members:
        coded = np.concatenate([decode(frame) for frame in frames(vector(seed))])
        total += coded * np.float32(weight)
    return total


def test_a_chunk_is_in_the_sum_before_the_next_one_arrives(store):
    """The work left when the last chunk has arrived does not grow with the model."""
    begin(store, key("a"))
    for index in range(CHUNKS):
        write(store, key("a"), 1, [index])
        stop = min((index + 1) * CHUNK, MANIFEST.values)
        assert np.array_equal(raw(store)[:stop], added((1, 3.0))[:stop])
        assert not raw(store)[stop:].any()
    store.spool_finish(key("a"))
    assert file_name(key("a")) not in store._files.reads, "nothing is read again"
    assert weights(store) == {key("a"): 3.0}
    assert np.array_equal(sum_of(store), added((1, 3.0)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{}, FULL], ids=["", "full"])
@pytest.mark.parametrize("weight", [0.0, 1e12])
@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800001, 0x7F800000, 0x7F61B1E6])
def test_a_delta_whose_last_chunk_is_bad_leaves_nothing_behind(run_root, bad, weight, options):
    """Values that are not finite, or overflow by their weight, end up in no version."""
    store = opened(run_root / "run", **options)
    begin(store, key("a"), weight)
    values = vector(1)
    values[-1:].view(np.uint32)[:] = bad
    for index, frame in enumerate(frames(values, CodecSpec(format="fp32"))):
        store.spool_write(key("a"), index, frame)
    assert store.spool_finish(key("a")).problem
    sent(store, key("b"), 2)
    assert np.array_equal(sum_of(store).astype(np.float32), added((2, 3.0)))
    store.close()


def test_a_delta_that_breaks_off_costs_little(store):
    """A delta that breaks off costs one chunk of at most MOST_BEFORE others per added chunk."""
    names = [f"c{number}" for number in range(merge_module.MOST_BEFORE + 1)]
    lengths = len(b"FSLFRM01") + 4 * CHUNKS
    for seed, name in enumerate(names):
        begin(store, key("x", seed + 1))
        write(store, key("x", seed + 1), 9, [0])
        store._files.reads.clear()
        sent(store, key(name), seed)
        again = {one: store._files.reads.get(file_name(key(one)), 0) for one in names[:seed]}
        one_chunk = max(len(encode(vector(seed)[:CHUNK], UP)) for seed in range(len(names)))
        assert all(0 < size <= lengths + one_chunk for size in again.values()), again
    begin(store, key("x", 99))
    before = raw(store)
    write(store, key("x", 99), 9, range(CHUNKS - 1))
    assert np.array_equal(raw(store), before)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("weight", [1e39, math.inf, math.nan, -1.0])
def test_an_invalid_weight_adds_nothing(run_root, weight, full):
    """It would make the sum infinite when no chunk is left to be checked."""
    store = opened(run_root / "run", **(FULL if full else {}))
    begin(store, key("a"), weight)
    write(store, key("a"), 1, range(CHUNKS))
    assert not raw(store).any()
    store.spool_finish(key("a"))
    assert weights(store) == {}
    with pytest.raises(StoreError, match="has the weight"):
        store.commit(1, [merged_of(key("a"), weight)], 1.0)
    store.close()


def test_flushing_subnormals_changes_no_bit(run_root):
    """Some libraries flush subnormals to zero; the order of arrival must not show."""
    torch = pytest.importorskip("torch")
    stores = [opened(run_root / name) for name in ("early", "late")]
    torch.set_flush_denormal(True)
    try:
        for store, weight in zip(stores, (0.1, None), strict=True):
            for seed, client in enumerate("ab"):
                begin(store, key(client), weight)
                write(store, key(client), seed, range(CHUNKS))
                store.spool_finish(key(client))
            store._open.merging.merge._assemble([merged_of(key(client), 0.1) for client in "ab"])
        sums = [sum_of(store).view(np.uint32).copy() for store in stores]
    finally:
        torch.set_flush_denormal(False)
    assert ((sums[0] & 0x7F800000) == 0).any(), "there are subnormals"
    assert np.array_equal(*sums)
    for store in stores:
        store.close()


@pytest.mark.parametrize("options", [{}, {"threads": 3}, FULL], ids=["", "threads", "full"])
@pytest.mark.parametrize("error", [NoWorkerThread("a test"), MemoryError("a test")])
def test_half_an_addition_of_a_delta_does_not_count(run_root, monkeypatch, options, error):
    """Whatever stops it, its acknowledgement stands, and a commit tries again."""
    store, late = opened(run_root / "run", **options), opened(run_root / "late", **options)
    sent(store, key("a"), 1)
    run = store._pool.run

    def stop_half_way(job, chunks):
        run(job, itertools.islice(chunks, 2))
        raise error

    merged = [merged_of(key("a"), 3.0), merged_of(key("b"), 2.0)]
    begin(store, key("c"))
    write(store, key("c"), 3, [0])  # so that b is added from the spool
    with monkeypatch.context() as patch:
        patch.setattr(store._pool, "run", stop_half_way)
        sent(store, key("b"), 2, 2.0)
        assert weights(store) == {key("a"): 3.0}
        for _ in range(2):
            with pytest.raises(type(error)):
                store.commit(1, merged, 1.0)
    assert np.array_equal(sum_of(store).astype(np.float32), added((1, 3.0)))
    sent(late, key("a"), 1, None)
    sent(late, key("b"), 2, None)
    assert weights(late) == {}
    assert store.commit(1, merged, 1.0).digest == late.commit(1, merged, 1.0).digest
    store.close()
    late.close()


def test_a_sum_begins_with_the_oldest_pending_delta(store):
    """The next version needs that one first: a sum of others would be made again."""
    sent(store, key("a"), 1, None)
    begin(store, key("b"))
    write(store, key("b"), 2, range(CHUNKS))
    assert not raw(store).any()
    store.spool_finish(key("b"))
    assert weights(store) == {}


def test_a_delta_that_a_version_overtakes_waits_for_its_weight(store):
    """Its weight depends on its staleness, and the sum that it was begun for is gone."""
    sent(store, key("a"), 1)
    begin(store, key("b"))
    write(store, key("b"), 2, [0])
    store.commit(1, [merged_of(key("a"), 3.0)], 1.0)
    write(store, key("b"), 2, range(1, CHUNKS))
    store.spool_finish(key("b"))
    assert weights(store) == {}
    assert not raw(store).any()


def test_robust_rules_wait_for_complete_deltas(run_root):
    """They have no sum."""
    store = opened(run_root / "run", rule=rule_named("median"))
    sent(store, key("a"), 1)
    assert weights(store) == {}
    store.close()


# --- all at once: one store adds deltas on arrival, its twin at the commit ---

CLIENTS = 4
STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, CLIENTS - 1), st.integers(1, CHUNKS)),
    st.tuples(
        st.sampled_from(
            ["send", "lighter", "again", "give up", "bad", "lose", "quarantine", "hold"]
        ),
        st.integers(0, CLIENTS - 1),
        st.just(1),
    ),
    st.tuples(
        st.sampled_from(["commit", "overtake", "release", "crash", "fault"]), st.just(0), st.just(0)
    ),
)


def usual_weight(client):
    return 0.1 + int(client[1:]) / 7


@define
class Transfer:
    """What a client is sending."""

    key: DeltaKey
    seed: int
    weight: float
    bad: bool = False
    done: int = 0

    def frames(self):
        values = vector(self.seed)
        if self.bad:
            values[2 * CHUNK + 3] = math.nan
        return frames(values, CodecSpec(format="bf16"))


class Twin:
    """A store, and the transfers of its clients."""

    def __init__(self, root, options, *, early):
        self.early = early
        self.store = opened(root, **options)
        self.sequences = [0] * CLIENTS
        self.transfers = [None] * CLIENTS
        self.seeds = itertools.count(1)
        self.digests = []
        self.weights = {}
        self.is_faulty = False

    @property
    def book(self):
        return self.store._open.facts.book

    def begin(self, client, which):
        transfer = Transfer(which, next(self.seeds), usual_weight(which.client))
        one = delta_of(which, metrics={"seed": transfer.seed})
        weight = transfer.weight if self.early else None
        assert self.store.spool_begin(one, weight) is None
        self.transfers[client] = transfer

    def with_fault(self, act):
        """Run `act`; if a fault is due, first with an unreadable disk, then with a readable one."""
        if self.is_faulty:
            self.is_faulty = False
            before = list(self.book.pending)
            self.store._files.unreadable |= {file_name(one) for one in before}
            try:
                return act()
            except StoreError:
                assert list(self.book.pending) == before
            finally:
                self.store._files.unreadable.clear()
        return act()

    def send(self, client, chunks):
        if self.transfers[client] is None:
            self.sequences[client] += 1
            self.begin(client, key(f"c{client}", self.sequences[client], self.store.version))
        one = self.transfers[client]
        coded = one.frames()
        stop = min(CHUNKS, one.done + chunks)
        for index in range(one.done, stop):
            self.store.spool_write(one.key, index, coded[index])
        one.done = stop
        if stop == CHUNKS:
            self.transfers[client] = None
            self.weights[one.key] = one.weight
            self.store.spool_finish(one.key)

    def commit(self, keys):
        if keys:
            merged = [merged_of(one, self.weights[one]) for one in keys]
            version = self.store.version + 1
            made = self.with_fault(lambda: self.store.commit(version, merged, 0.1))
            self.digests.append(made.digest)

    def apply(self, what, client, chunks):
        one = self.transfers[client]
        if what == "send":
            self.send(client, chunks)
        elif what == "commit":
            self.commit(list(self.book.pending))
        elif what == "overtake":  # one is acknowledged that the machine does not know of yet
            self.commit(list(self.book.pending)[:-1])
        elif what == "fault":
            self.is_faulty = True
        elif what == "crash":
            self.transfers = [None] * CLIENTS
            self.store.recover()
        elif what in {"quarantine", "hold"}:
            for which in list(self.book.pending):
                if which.client == f"c{client}":
                    self.store.quarantine(which, "a test", held=what == "hold")
        elif what == "release":
            for which in list(self.book.held):
                self.store.release(which)
        elif one is not None and what == "lighter":
            one.weight /= 2
        elif one is not None and what == "again":
            self.begin(client, one.key)
        elif one is not None and what == "give up":
            self.transfers[client] = None
        elif one is not None and what == "bad":
            one.bad = one.bad or one.done <= 2
        elif one is not None and what == "lose":
            self.store._files.sync_fails = True
            with pytest.raises(StoreError):
                self.send(client, CHUNKS)
            self.store._files.sync_fails = False
            self.begin(client, one.key)


@pytest.mark.parametrize("options", [{}, FULL, {"threads": 3}], ids=["", "full", "threads"])
@given(steps=st.lists(STEPS, min_size=20, max_size=60))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_versions_equal_those_of_complete_deltas(options, steps):
    """Interruptions, restarts, overtaking, quarantine, crashes: no effect on the bits."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as root:
        twins = [
            Twin(Path(root) / name, options, early=name == "early") for name in ("early", "late")
        ]
        try:
            for step in [*steps, ("commit", 0, 0)]:
                for twin in twins:
                    twin.apply(*step)
            early, late = twins
            assert early.digests == late.digests
            assert not late.store._open.merging.merge.weights
        finally:
            for twin in twins:
                twin.store.close()

"""The store survives a crash, a power cut or a full disk at every call to the disk.

A scenario (version 0, six deltas of which one is not finite, three commits, pruning) runs on a disk
that counts its calls. It then runs again for every call and every way in which that call can fail.
After each, the run directory is opened again, every promise is checked, and the scenario is
completed; the end must be the same to the bit.
"""

import copy
import json
import shutil
from collections import Counter
from itertools import count

import attrs
import numpy as np
import pytest
from deltas import delta_of, merged_of
from ledger_books import check_state

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.digest import DIGEST_CHARACTERS, chunk_digest, digest_of, vector_digest
from fsl_async.store.errors import StoreError
from fsl_async.store.files import Files
from fsl_async.store.manifest import Manifest
from fsl_async.store.records import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, decode, encode


class HealthyDisk(Files):
    """A disk that never fails and does not wait for the hardware."""

    def sync(self, descriptor):
        """Do nothing."""

    def sync_directory(self, path):
        """Do nothing."""


# --- the scenario, and its expected versions computed without the store ---

DOWN = CodecSpec(format="e4m3", entropy=False)
UP = CodecSpec(format="bf16", entropy=False)
# Saves the ledger's state at every commit and every start.
SETTINGS = StoreSettings(keep_versions=2, codec_down=DOWN, state_growth=0.0)
CHUNK = 48
MANIFEST = Manifest.from_shapes([("layer.weight", (9, 7)), ("layer.bias", (7,))])
RANDOM = np.random.default_rng(7)
INITIAL = RANDOM.standard_normal(MANIFEST.values).astype(np.float32)
ROUNDS = {
    1: [("a", 1), ("b", 1)],
    2: [("a", 2), ("nan", 1)],
    3: [("a", 3), ("b", 2)],
}
TOKENS = {("a", 1): 100, ("b", 1): 300, ("a", 2): 50, ("nan", 1): 9, ("a", 3): 10, ("b", 2): 90}
DELTAS = {name: RANDOM.standard_normal(MANIFEST.values).astype(np.float32) for name in TOKENS}
DELTAS["nan", 1][5] = np.nan
LAST = max(ROUNDS)
LEASED = ("a", "b", "nan")


def key_of(name, version):
    return DeltaKey(name[0], 1, version - 1, name[1])


KEYS = {key_of(name, version): version for version, names in ROUNDS.items() for name in names}
NAN = key_of(("nan", 1), 2)


def finite(version):
    return [name for name in ROUNDS[version] if name[0] != "nan"]


def scale_of(version):
    return 1.0 / sum(TOKENS[name] for name in finite(version))


def chunks_of(vector):
    return [vector[start : start + CHUNK] for start in range(0, len(vector), CHUNK)]


INITIAL_FRAMES = [encode(values, CodecSpec()) for values in chunks_of(INITIAL)]
FRAMES = {name: [encode(c, UP) for c in chunks_of(delta)] for name, delta in DELTAS.items()}


def expected_versions():
    """Return the weights of every version, computed from the formulas alone."""
    weights = [INITIAL]
    momentum = np.zeros_like(INITIAL)
    residual = np.zeros_like(INITIAL)
    for version in ROUNDS:
        growing = (version - 1) / (version + 9)
        rate, coefficient = np.float32(1 - growing / 1.9), np.float32(growing)
        total = np.zeros_like(INITIAL)
        for name in finite(version):
            arrived = np.concatenate([decode(frame) for frame in FRAMES[name]])
            total = total + np.float32(TOKENS[name]) * arrived
        average = total * np.float32(scale_of(version))
        momentum = coefficient * momentum + average
        desired = -rate * (average + coefficient * momentum) + residual
        sent = np.concatenate([decode(encode(c, DOWN)) for c in chunks_of(desired)])
        residual = desired - sent
        weights.append(weights[-1] + sent)
    return weights


# By the chunks of these tests, as a fixture sets them later.
EXPECTED = [
    vector_digest(chunk_digest(weights[at : at + CHUNK]) for at in range(0, len(weights), CHUNK))[
        :DIGEST_CHARACTERS
    ]
    for weights in expected_versions()
]


@attrs.define
class Promises:
    """What was reported outside: the store may never take it back."""

    acknowledged: set = attrs.field(factory=set)
    version: int = -1
    leases: dict = attrs.field(factory=dict)
    failures: int = 0


def retrying(act, promises, tries=12):
    """Repeat `act` while the disk fails, as the role does."""
    for attempt in range(tries):
        try:
            return act()
        except StoreError:
            promises.failures += 1
            if attempt == tries - 1:
                raise
    raise AssertionError


def publish(store, promises):
    def act():
        store.begin_initial(MANIFEST)
        for index, frame in enumerate(INITIAL_FRAMES):
            store.write_initial(index, frame)
        return store.finish_initial()

    committed = retrying(act, promises)
    assert (committed.version, committed.digest) == (0, EXPECTED[0])
    promises.version = 0


def send(store, promises, name, version):
    key = key_of(name, version)
    one = delta_of(key, TOKENS[name], 20, base_digest=EXPECTED[version - 1])

    def act():
        if store.spool_begin(one, TOKENS[name]) is None:
            frames = FRAMES[name]
            for index in range(store.spool_next_chunk(key), len(frames)):
                store.spool_write(key, index, frames[index])
            result = store.spool_finish(key)
            assert (result.problem is None) == (key != NAN)
        promises.acknowledged.add(key)

    retrying(act, promises)


def play(store, promises):
    """Open the store and complete the scenario from any state. Return what `recover` returned."""
    recovered = retrying(store.recover, promises)
    for position, name in enumerate(LEASED):
        index = retrying(lambda name=name: store.lease(name, len(LEASED)), promises)
        assert index == position
        promises.leases[name] = index
    if recovered.version < 0:
        publish(store, promises)
    for version in range(max(1, store.version + 1), LAST + 1):
        for name in ROUNDS[version]:
            send(store, promises, name, version)
        merged = []
        for name in finite(version):
            key = key_of(name, version)
            retrying(lambda key=key, name=name: store.accumulate(key, TOKENS[name]), promises)
            merged.append(merged_of(key, TOKENS[name], tokens=TOKENS[name], steps=20))
        committed = retrying(
            lambda version=version, merged=merged: store.commit(version, merged, scale_of(version)),
            promises,
        )
        assert (committed.version, committed.digest) == (version, EXPECTED[version])
        promises.version = version
    return recovered


def run_process(root, disk, promises, settings=SETTINGS):
    """Run one process on `disk`; return True when it completed the scenario."""
    store = Store(root, settings, files=disk)
    try:
        play(store, promises)
        store.close()
    except SystemExit:
        store._pool.close()
        return False
    return True


def listing(path):
    return sorted(entry.name for entry in path.iterdir())


def facts_of(root):
    lines = (root / "ledger.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def check_promises(root, promises, settings=SETTINGS):
    """Open the directory on a healthy disk and check every promise.

    Return what `recover` returned.
    """
    check_state(root)
    store = Store(root, settings, files=HealthyDisk())
    recovered = store.recover()
    assert promises.version <= recovered.version <= promises.version + 1
    version = recovered.version
    assert not any("cannot be used" in notice for notice in store.notices)
    if version >= 0:
        assert recovered.digest == EXPECTED[version]
        frames = [store.read_full(version, index) for index in range(MANIFEST.chunks)]
        assert digest_of(np.concatenate([decode(frame) for frame in frames])) == EXPECTED[version]
    pending = {delta.key for delta in recovered.pending}
    known = pending | set(recovered.settled)
    assert promises.acknowledged <= known, "an acknowledged delta is lost"
    assert not pending & set(recovered.settled), "a delta is in two states"
    for key, planned in KEYS.items():
        if key in known and key != NAN:
            state = "merged" if planned <= version else "accepted"
            assert store.known(key) == state
    for name, index in promises.leases.items():
        assert recovered.leases[name] == index
    assert recovered.tokens_total == sum(
        TOKENS[name] for v in ROUNDS if v <= version for name in finite(v)
    )
    store.close()
    return recovered


def check_end(root, *, all_whole=True):
    """Check the end of the scenario: one merge per delta, and no leftover files.

    all_whole: no older version and no further delta is needed for the kept ones.
    """
    store = Store(root, SETTINGS, files=HealthyDisk())
    recovered = store.recover()
    assert check_state(root), "every commit saves the ledger's state"
    assert not any("ledger.state" in notice for notice in store.notices)
    assert (recovered.version, recovered.digest) == (LAST, EXPECTED[LAST])
    assert recovered.pending == ()
    assert recovered.settled == {key: "quarantined" if key == NAN else "merged" for key in KEYS}
    store.close()
    merged = Counter()
    for fact in facts_of(root):
        if fact["fact"] == "version":
            merged.update(entry["key"] for entry in fact["merged"])
    assert merged == Counter(key.text for key in KEYS if key != NAN)
    kept = {key.text.replace("/", "@") + ".frames" for key, v in KEYS.items() if v == LAST}
    versions, spooled = listing(root / "checkpoints"), set(listing(root / "spool"))
    assert versions[-2:] == ["v00000002", "v00000003"]
    assert spooled >= kept
    assert not all_whole or (len(versions), spooled) == (2, kept)
    assert listing(root / "quarantine") == [NAN.text.replace("/", "@") + ".frames"]


def calls_of_a_complete_run(run_root, crash_disk, settings=SETTINGS):
    root = run_root / "dry"
    root.mkdir()
    disk = crash_disk(root)
    assert run_process(root, disk, Promises(), settings)
    check_end(root)
    shutil.rmtree(root)
    return disk.calls


RESIDENT = attrs.evolve(SETTINGS, resident=True, snapshot_thread=False)


BEGIN = {None: 0, "all": 1, "names": 2, 1: 3}
"""First call of a loss of power: with a stride of four, each call is the last one once."""


# A crash before a call equals a crash after the previous one, so only one of them is tested.
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("settings", [SETTINGS, RESIDENT], ids=["from disk", "in memory"])
@pytest.mark.parametrize(
    "way",
    [("after", None), ("torn", None), ("after", "all"), ("after", "names"), ("after", 1)],
    ids=str,
)
def test_a_crash_at_any_call_loses_nothing(run_root, crash_disk, way, settings, stride):
    """After a crash at any call of a commit, or of a checkpoint, nothing acknowledged is lost or
    counted twice, and the digests are the same.
    """
    mode, power = way
    calls = calls_of_a_complete_run(run_root, crash_disk, settings)
    assert len(calls) > 150
    places = [at for at, name in enumerate(calls, start=1) if mode == "after" or name == "write"]
    for at in places[BEGIN[power] % stride :: stride if mode == "after" else min(stride, 2)]:
        root = run_root / str(at)
        root.mkdir()
        disk = crash_disk(root, at, mode)
        promises = Promises()
        assert not run_process(root, disk, promises, settings)
        assert disk.fired
        disk.bury(power)
        check_promises(root, promises, settings)
        assert run_process(root, HealthyDisk(), promises, settings)
        check_end(root)
        shutil.rmtree(root)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("mode", "power"),
    [("torn", None), *(pytest.param("after", one, marks=pytest.mark.sweep) for one in ("all", 1))],
)
def test_a_crash_while_a_thread_writes_a_checkpoint_loses_nothing(
    run_root, crash_disk, mode, power
):
    """It stops the store in any call, and the checkpoint wherever it is."""
    settings = attrs.evolve(RESIDENT, snapshot_thread=True, threads=2)
    others = 0
    for at in range(1, 220, 2):
        root = run_root / str(at)
        root.mkdir()
        disk, promises = crash_disk(root, at, mode, order=at), Promises()
        run_process(root, disk, promises, settings)  # may end before the thread is stopped
        others += disk.by_others[-1]
        disk.bury(power)
        check_promises(root, promises, settings)
        assert run_process(root, HealthyDisk(), promises, settings)
        check_end(root, all_whole=False)
        shutil.rmtree(root)
    assert others > 10, "the crash must fall on the threads too"


TWO_THREADS = attrs.evolve(SETTINGS, threads=2)


@pytest.mark.parametrize(
    ("mode", "power", "stride"),
    [
        ("torn", None, 3),
        ("after", "all", 3),
        pytest.param("after", 1, 3, marks=pytest.mark.sweep),
        pytest.param("after", "all", 1, marks=pytest.mark.sweep),
    ],
)
def test_a_crash_among_several_threads_loses_nothing(run_root, crash_disk, mode, power, stride):
    """Two threads write a version; a crash stops one in any call, and the other wherever it is."""
    count_of_calls = len(calls_of_a_complete_run(run_root, crash_disk))
    others = cut_short = 0
    for at in range(1, count_of_calls + 1, stride):
        root = run_root / str(at)
        root.mkdir()
        disk, promises = crash_disk(root, at, mode, order=at), Promises()
        assert not run_process(root, disk, promises, TWO_THREADS)
        assert disk.fired
        others += disk.by_others[-1]
        cut_short += disk.cut_short
        disk.bury(power)
        check_promises(root, promises)
        assert run_process(root, HealthyDisk(), promises, TWO_THREADS)
        check_end(root)
        shutil.rmtree(root)
    assert others > 30 / stride, "the crash must fall on the threads, not only on their caller"
    assert mode != "torn" or cut_short > 2, "more than one thread must be at work"


@pytest.mark.parametrize("power", [pytest.param(None, marks=pytest.mark.sweep), "all"])
def test_a_crash_during_recovery_loses_nothing(run_root, crash_disk, power):
    """A crash may also fall into recovery, which must then start over."""
    calls = calls_of_a_complete_run(run_root, crash_disk)
    crashes = 0
    for at in range(3, len(calls) + 1, 11):
        first = run_root / f"first-{at}"
        first.mkdir()
        disk, promises = crash_disk(first, at, "after"), Promises()
        assert not run_process(first, disk, promises)
        disk.bury(power)
        for crash_at in count(1):
            root = run_root / f"{at}-{crash_at}"
            shutil.copytree(first, root)
            disk = crash_disk(root, crash_at, "after")
            try:
                store = Store(root, SETTINGS, files=disk)
                store.recover()
            except SystemExit:
                pass
            disk.bury(power)
            check_promises(root, promises)
            if crash_at % 3 == 0:
                assert run_process(root, HealthyDisk(), copy.deepcopy(promises))
                check_end(root)
            shutil.rmtree(root)
            if not disk.fired:
                break
            crashes += 1
        shutil.rmtree(first)
    assert crashes > 100


# With a stride of two, each call fails once or six times.
@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("failures", [1, 6])
def test_a_failing_call_can_be_tried_again(run_root, crash_disk, failures, stride):
    """A full disk costs time, never data: after one or several failures the run goes on."""
    calls = calls_of_a_complete_run(run_root, crash_disk)
    places = range(1 + failures % 2 if stride > 1 else 1, len(calls) + 1, stride)
    noticed = 0
    for at in places:
        root = run_root / str(at)
        root.mkdir()
        disk, promises = crash_disk(root, at, "error", failures), Promises()
        assert run_process(root, disk, promises)
        assert disk.fired
        noticed += promises.failures > 0
        check_end(root)
        shutil.rmtree(root)
    assert noticed > len(places) // 2


@pytest.mark.parametrize("power", [None, "all"])
def test_a_crash_after_a_failing_call_loses_nothing(run_root, crash_disk, power):
    """A full disk is often followed by a crash: recovery handles what a failed call left."""
    calls = calls_of_a_complete_run(run_root, crash_disk)
    for at in range(2, len(calls) + 1, 3):
        root = run_root / str(at)
        root.mkdir()

        disk, promises = crash_disk(root, at, "error", die_after=3), Promises()
        try:
            run_process(root, disk, promises)
        finally:
            disk.bury(power)
        check_promises(root, promises)
        assert run_process(root, HealthyDisk(), promises)
        check_end(root)
        shutil.rmtree(root)


@pytest.mark.parametrize("power", [None, "all"])
def test_a_crash_during_a_rollback_is_finished_by_the_next_start(run_root, crash_disk, power):
    """An interrupted rollback must never mix two lineages."""
    complete = run_root / "complete"
    complete.mkdir()
    assert run_process(complete, HealthyDisk(), Promises())
    crashes = 0
    for at in count(1):
        root = run_root / str(at)
        shutil.copytree(complete, root)
        disk = crash_disk(root, at, "after")
        store = Store(root, SETTINGS, from_version=LAST - 1, files=disk)
        try:
            store.recover()
        except SystemExit:
            crashes += 1
        disk.bury(power)
        rolled_back = any(fact["fact"] == "rollback" for fact in facts_of(root))
        store = Store(root, SETTINGS)
        recovered = store.recover()
        assert recovered.version == (LAST - 1 if rolled_back else LAST)
        store.close()
        store = Store(root, SETTINGS, from_version=LAST - 1)
        recovered = store.recover()
        assert (recovered.version, recovered.digest) == (LAST - 1, EXPECTED[LAST - 1])
        assert {delta.key for delta in recovered.pending} == {
            key for key, version in KEYS.items() if version == LAST
        }
        store.close()
        assert sum(fact["fact"] == "rollback" for fact in facts_of(root)) == 1
        renamed = [name for name in listing(root / "checkpoints") if name.startswith("rolled")]
        assert renamed == ["rolled-back-1-v00000003"]
        assert run_process(root, HealthyDisk(), Promises(version=LAST - 1))
        assert check_promises(root, Promises(version=LAST)).version == LAST
        shutil.rmtree(root)
        if not disk.fired:
            break
    assert crashes >= 4

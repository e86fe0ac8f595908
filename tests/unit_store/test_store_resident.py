"""A store that keeps the newest version in memory: the same versions, durable before they count."""

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from deltas import merged_of

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.disk import chunk_files as digests_module
from fsl_async.store.errors import CheckpointDamaged, Damage, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.outer import Nesterov
from fsl_async.store.vectors import memory
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import WEIGHTS, Checkpoints, flat_name

CHUNK = 20
"""A model of several chunks."""


MOMENTUM = flat_name("momentum")
MODEL = Manifest.from_shapes([("w", (9, 10)), ("b", (7,))], [("mean", (25,))])


def digest_of(weights):
    """As nodes compare it."""
    return digests_module.digest_of(weights, weights=MODEL.weights)


class Slow(Files):
    """A disk whose writes of a snapshot wait for the test."""

    def __init__(self):
        self.gate = threading.Event()

    def write(self, descriptor, data, offset):
        """Wait, if it is the snapshot that writes."""
        if threading.current_thread().name == "snapshot":
            self.gate.wait(0.1)
        super().write(descriptor, data, offset)

    def sync(self, descriptor):
        """Do nothing."""


class Full(Files):
    """A disk that is full for one thread, by its name."""

    def __init__(self, thread):
        self.thread = thread
        self.is_full = True

    def write(self, descriptor, data, offset):
        """Fail, if it is that thread."""
        if self.is_full and threading.current_thread().name == self.thread:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data, offset)

    def sync(self, descriptor):
        """Do nothing."""


def resident(make_run, name="run", **options):
    return make_run(name, manifest=MODEL, **{"snapshot_thread": True} | options)


def wholes(run):
    """The versions whose vectors are on disk."""
    paths = (run.root / "checkpoints").glob(f"v*/{WEIGHTS}")
    return sorted(int(path.parent.name[1:]) for path in paths)


def until(condition):
    give_up_at = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_versions_are_the_same_in_mapped_memory(make_run, rule):
    """To the bit: digests, ledger and what clients fetch. Scratch files have no names."""
    from fsl_async.store.rules.aggregation import rule_named

    mapped = resident(make_run, "mapped", rule=rule_named(rule), resident=False)
    holds = resident(make_run, "holds", rule=rule_named(rule))
    for run in (mapped, holds):
        run.start()
    for version in (1, 2, 3, 4):
        one, other = (run.round(version, "a", "b", "c") for run in (mapped, holds))
        for run in (mapped, holds):
            run.store.finish_snapshot()
        assert one.digest == other.digest
        assert np.array_equal(mapped.weights(version), holds.weights(version))
        assert mapped.store.read_update(version, 1) == holds.store.read_update(version, 1)
    assert mapped.store.records == holds.store.records
    assert not list(mapped.root.glob("scratch*"))


def test_a_start_replays_what_no_checkpoint_has(make_run):
    """Killed at any time: the same digests, momentum included, as the next version shows."""
    through, killed = resident(make_run, "through"), resident(make_run, "killed")
    for run in (through, killed):
        run.start()
        for version in (1, 2, 3):
            run.round(version, "a", "b")
    slow = Slow()
    killed.open(slow)
    until(lambda: killed.store.version == 3)
    assert killed.weights(3) is not None
    slow.gate.set()
    killed.open()
    assert killed.store.digest == digest_of(killed.weights(3)) == through.store.digest
    assert killed.round(4, "a").digest == through.round(4, "a").digest


def test_a_commit_does_not_wait_for_a_checkpoint_until_it_is_late(make_run):
    """It is given up; after `snapshot_every` versions the commit waits."""
    run = resident(make_run, snapshot_every=2)
    run.start()
    slow = Slow()
    run.open(slow)
    run.round(1, "a")
    run.round(2, "a")
    assert wholes(run) == [0]
    run.round(3, "a")
    assert wholes(run) == [0, 2], "version 2 had to be whole first"


def test_deltas_stay_until_a_checkpoint_does_without_them(make_run):
    """They are the write-ahead log."""
    run = resident(make_run, keep_versions=1, snapshot_every=50)
    run.start()
    run.open(Full("snapshot"))
    for version in (1, 2, 3):
        run.round(version, "a")
    spool = run.root / "spool"
    assert len(list(spool.iterdir())) == 3
    assert wholes(run) == [0]
    digest = run.store.digest
    run.open()
    assert run.store.digest == digest
    run.store.finish_snapshot()
    run.round(4, "a")
    run.store.finish_snapshot()
    run.round(5, "a")
    run.store.finish_snapshot()
    left = sorted(path.name for path in spool.iterdir())
    assert left == ["a@1@3@4.frames", "a@1@4@5.frames"], "4 in case the files of 5 are damaged"


def test_a_full_disk_keeps_versions_from_being_whole_and_nothing_else(make_run):
    """The run goes on, with one line."""
    run = resident(make_run)
    run.start()
    disk = Full("snapshot")
    run.open(disk)
    lines = []
    run.store.report = lines.append
    run.round(1, "a")
    run.store.finish_snapshot()
    assert wholes(run) == [0]
    assert any("No space left" in line and "the spool is kept" in line for line in lines)
    disk.is_full = False
    run.round(2, "a")
    run.store.finish_snapshot()
    assert wholes(run) == [0, 2]


def test_a_damaged_checkpoint_is_made_again_over_versions_that_are_not_whole(make_run):
    """From the newest whole one before, with every version between."""
    run = resident(make_run, keep_versions=1)
    run.start()
    disk = Full("snapshot")
    run.open(disk)
    for version in (1, 2, 3, 4):
        disk.is_full = version in (2, 3)
        run.round(version, "a", "b")
        run.store.finish_snapshot()
    assert wholes(run) == [0, 1, 4]
    digest = run.store.digest
    run.close()
    path = run.root / "checkpoints" / "v00000004" / MOMENTUM
    path.write_bytes(path.read_bytes()[:-1])
    run.open()
    assert any("4: momentum.safetensors " in line for line in run.store.notices)
    assert run.store.digest == digest == digest_of(run.weights(4))
    run.store.finish_snapshot()
    assert wholes(run) == [0, 1, 4]
    through = resident(make_run, "through", keep_versions=1)
    through.start()
    for version in (1, 2, 3, 4):
        through.round(version, "a", "b")
    assert run.round(5, "a").digest == through.round(5, "a").digest, "momentum too"


class Fails(Files):
    """A disk that fails once, at the n-th changing call of a commit."""

    def __init__(self):
        self.left = -1

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, descriptor, data, offset):
        """Count."""
        self._count()
        super().write(descriptor, data, offset)

    def sync(self, descriptor):
        """Count."""
        self._count()

    def rename(self, source, target):
        """Count."""
        self._count()
        super().rename(source, target)


def test_a_command_on_facts_makes_no_version_whole(make_run):
    """It knows neither codec nor rule of the run, so its momentum would be another."""
    run = resident(make_run)
    run.start()
    run.open(Full("snapshot"))
    run.round(1, "a")
    run.open(only_facts=True)
    assert (run.store.version, wholes(run)) == (1, [0])


def test_damage_in_memory_is_found_when_it_is_looked_for(make_run):
    """A client reports another digest: the parameter server reads what it has."""
    run = resident(make_run)
    run.start()
    run.round(1, "a")
    run.store.finish_snapshot()
    assert run.store.verify(1)
    run.store._open.newest.vectors.named[WEIGHTS][3] += 1.0
    assert not run.store.verify(1)
    assert run.store.verify(1)
    assert digest_of(run.weights(1)) == run.store.digest


def test_a_lost_delta_after_the_checkpoint_loses_no_version(make_run):
    """The coded change gives the weights; momentum begins again, with one line."""
    run = resident(make_run, outer=Nesterov())
    run.start()
    run.open(Full("snapshot"))
    for version in (1, 2):
        run.round(version, "a")
    digest = run.store.digest
    run.close()
    (_, second) = sorted((run.root / "spool").iterdir())
    second.unlink()
    run.open()
    assert digest_of(run.weights(2)) == run.store.digest == digest
    assert not run.store._open.newest.vectors.named[MOMENTUM].any()
    assert run.store.notices[-1].endswith("momentum and coding error begin again at zero")
    assert run.round(3, "a").version == 3


def test_what_cannot_be_made_again_is_named(make_run):
    """No version is built upon guesses."""
    run = resident(make_run)
    run.start()
    run.open(Full("snapshot"))
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    path = run.root / "checkpoints" / "v00000001" / "update.bin"
    path.write_bytes(path.read_bytes()[:-3])
    (first, _) = sorted((run.root / "spool").iterdir())
    first.unlink()
    with pytest.raises(CheckpointDamaged, match="version 2"):
        run.open()


def test_a_version_that_is_fetched_in_full_stays_until_it_is_on_disk(make_run):
    """A joiner on a thin line takes longer than a round."""
    run = resident(make_run)
    run.start()
    slow = Slow()
    run.open(slow)
    run.round(1, "a")
    run.store.keep_from(1)
    first = run.store.read_full(1, 0)
    expected = run.weights(1)
    threading.Timer(0.2, slow.gate.set).start()
    run.round(2, "a")
    assert run.store.read_full(1, 0) == first
    assert np.array_equal(run.weights(1), expected)
    run.store.keep_from(None)


def test_a_rollback_goes_to_a_version_that_is_not_whole(make_run):
    """Its vectors are replayed; later versions are renamed, their deltas pending again."""
    run = resident(make_run)
    run.start()
    run.open(Full("snapshot"))
    for version in (1, 2, 3):
        run.round(version, "a")
    digests = {one.version: one.digest for one in run.store.records}
    recovered = run.open(from_version=2)
    assert (recovered.version, recovered.digest) == (2, digests[2])
    assert digest_of(run.weights(2)) == digests[2]
    assert [one.key.base for one in recovered.pending] == [2]


def test_a_model_that_does_not_fit_is_mapped(make_run, monkeypatch):
    """With one line; a run without a planned end needs a vector more, for the mean."""
    monkeypatch.setattr(memory, "available_bytes", lambda: int(4.0 * 4 * MODEL.values))
    for may_keep_mean in (True, False):
        run = resident(make_run, f"mean-{may_keep_mean}", may_keep_mean=may_keep_mean)
        lines = []
        run.open()
        run.store.report = lines.append
        run.publish()
        assert len([line for line in lines if "are mapped" in line]) == may_keep_mean
        run.round(1, "a")
        run.store.finish_snapshot()
        assert wholes(run) == [0, 1]


def test_a_disk_without_space_for_scratch_files_is_named(make_run, monkeypatch):
    """A write to a mapped page without a block would kill the process."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = resident(make_run, resident=False)
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        run.start()
        with pytest.raises(StoreError, match=r"no scratch file of .* in .*No space left"):
            run.round(1, "a")
    run.round(1, "a")


class Unreadable(Fails):
    """A disk that fails once at a changing call, and then at the next `reads` openings."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def open_existing(self, path, *, writable=False):
        """Fail, while it is to."""
        if self.reads and threading.current_thread() is threading.main_thread():
            self.reads -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open_existing(path, writable=writable)

    def _count(self):
        self.left -= 1
        if self.left == 0:
            self.reads = 3
            raise OSError(errno.ENOSPC, "No space left on device")


def test_nothing_is_made_of_a_memory_that_could_not_be_restored(make_run):
    """The commit fails and fails to take itself back: it is tried again until it does."""
    through = resident(make_run, "through", snapshot_thread=False)
    broken = resident(make_run, "broken", snapshot_thread=False)
    disk = Unreadable()
    through.start()
    broken.start()
    broken.open(disk)
    for version in range(1, 25):
        through.round(version, "a")
        key = DeltaKey("a", 1, version - 1, version)
        values = np.random.default_rng(100 * version).standard_normal(MODEL.values)
        broken.send(key, values.astype("f4"))
        disk.left = version
        failed = 0
        while True:
            try:
                made = broken.store.commit(version, [merged_of(key, 10.0, tokens=10)], 0.1)
            except StoreError:
                failed += 1
                broken.store.finish_snapshot()
                assert version not in wholes(broken)
            else:
                break
        disk.left, disk.reads = -1, 0
        assert made.digest == through.store.digest
    broken.store.finish_snapshot()
    broken.open()
    assert broken.store.digest == through.store.digest


def test_a_delta_that_is_sent_again_is_not_removed_with_its_old_file(make_run):
    """Its sync failed, its file was to be removed, and the thread that removes is slow."""

    class SlowToRemove(Files):
        def __init__(self):
            self.gate, self.fails = threading.Event(), False

        def remove(self, path):
            if threading.current_thread().name == "snapshot":
                self.gate.wait(20.0)
            super().remove(path)

        def sync(self, descriptor):
            if self.fails:
                self.fails = False
                raise OSError(errno.EIO, "Input/output error")

    run = resident(make_run)
    run.start()
    disk = SlowToRemove()
    disk.gate.set()
    run.open(disk)
    again = DeltaKey("b", 1, 0, 1)
    disk.fails = True
    with pytest.raises(StoreError, match="Input/output"):
        run.send(again, np.ones(MODEL.values, np.float32))
    disk.gate.clear()
    run.round(1, "a")
    assert run.send(again, np.ones(MODEL.values, np.float32)).problem is None
    disk.gate.set()
    run.store.finish_snapshot()
    run.round(2, "a")
    run.store.finish_snapshot()
    recovered = run.open()
    assert [delta.key for delta in recovered.pending] == [again]


def test_replay_needs_no_descriptor_for_each_delta(make_run, monkeypatch):
    """Versions of a thousand clients are made again by a process of a thousand descriptors."""

    class Counts(Files):
        def __init__(self):
            self.open, self.most = 0, 0

        def open_existing(self, path, *, writable=False):
            self.open += 1
            self.most = max(self.most, self.open)
            return super().open_existing(path, writable=writable)

        def close(self, descriptor):
            self.open -= 1
            super().close(descriptor)

    run = resident(make_run)
    run.start()
    run.open(Full("snapshot"))
    run.round(1, *(f"c{number}" for number in range(40)))
    disk = Counts()
    run.open(disk)
    assert run.store.version == 1
    assert disk.most < 15


def test_a_system_without_threads_costs_checkpoints_only(make_run, monkeypatch):
    """The commits go on, with a line; the end of the run may write one."""
    run = resident(make_run)
    run.start()
    lines = []
    run.store.report = lines.append
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no"))
        )
        run.round(1, "a")
        run.round(2, "a")
    assert wholes(run) == [0]
    assert lines[0] == "version 1 has no checkpoint yet: no"
    run.store.finish_snapshot()
    assert wholes(run) == [0, 2]


def test_memory_that_is_read_again_is_not_written_meanwhile(make_run):
    """A checkpoint under way is given up when the vectors are loaded again."""

    class Steps(Files):
        def __init__(self):
            self.begin, self.waits, self.go_on = (threading.Event() for _ in range(3))
            self.momentum_writes = 0

        def write(self, descriptor, data, offset):
            if threading.current_thread().name == "snapshot":
                self.begin.wait(20.0)
                name = Path(f"/proc/self/fd/{descriptor}").readlink().name
                self.momentum_writes += name == MOMENTUM
                if self.momentum_writes == 3:
                    self.waits.set()
                    self.go_on.wait(0.5)
            super().write(descriptor, data, offset)

        def sync(self, descriptor):
            pass

    run = resident(make_run)
    run.start()
    disk = Steps()
    run.open(disk)
    run.round(1, "a")
    vectors = run.store._open.newest.vectors
    momentum = vectors.named[MOMENTUM].copy()
    vectors.named[MOMENTUM][:] = 7.0
    disk.begin.set()
    assert disk.waits.wait(20.0)  # the weights are written, and a part of the wrong momentum
    vectors.named[WEIGHTS][3] += 1.0
    assert not run.store.verify(1)
    assert np.array_equal(vectors.named[MOMENTUM], momentum)
    disk.go_on.set()
    run.store.finish_snapshot()
    run.open()
    assert wholes(run) == [0, 1]
    assert np.array_equal(run.store._open.newest.vectors.named[MOMENTUM], momentum)


def test_damaged_memory_gets_no_checkpoint(make_run):
    """Its weights are compared with the version's digest before it is declared whole."""
    run = resident(make_run)
    run.start()
    disk = Full("snapshot")
    run.open(disk)
    lines = []
    run.store.report = lines.append
    run.round(1, "a")
    run.store._open.newest.vectors.named[WEIGHTS][3] += 1.0
    disk.is_full = False
    run.store.finish_snapshot()
    assert wholes(run) == [0]
    assert any("not in memory as it was made" in line for line in lines)


def test_a_version_may_become_whole_while_it_is_read(make_run):
    """The version that it was to be made from is removed: it is read again, as it is now."""
    run = resident(make_run, keep_versions=1)
    run.start()
    run.open(Full("snapshot"))
    run.round(1, "a")
    store = run.store
    expected = run.weights(1)

    class Meanwhile(Files):
        is_first = True

        def open_existing(self, path, *, writable=False):
            if path.name == WEIGHTS and self.is_first:
                self.is_first = False
                store._open.newest.snapshots._files.is_full = False
                store.finish_snapshot()
                for old in store._open.run.retire(1):
                    self.remove_any(old)
            return super().open_existing(path, writable=writable)

    files = Meanwhile()
    read = read_version(files, Checkpoints(files, run.root), 1, MODEL)
    assert wholes(run) == [1]
    assert np.array_equal(read.weights, expected)
    with pytest.raises(Damage):
        read_version(files, Checkpoints(files, run.root), 0, MODEL)

"""A version that several threads write: the same bytes, whoever is slow, and nothing changed where the disk fails."""

import errno
import os
import random
import threading
import time

import numpy as np
import pytest

import fsl_async.learn.manifest as manifest_module
from fsl_async.events import DeltaKey
from fsl_async.learn.errors import StoreError
from fsl_async.learn.files import Files
from fsl_async.learn.manifest import Manifest
from fsl_async.learn.records import MergedDelta
from fsl_codecs import CodecSpec

SEVEN_CHUNKS = Manifest.from_shapes([("w", (64, 6)), ("b", (17,))])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Seven chunks, the last one shorter."""
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", 64)


class Disk(Files):
    """Does not wait for the hardware; `hurdle(name, descriptor)` comes before each write and sync."""

    def __init__(self, hurdle):
        self.hurdle = hurdle

    def write(self, descriptor, data, offset):
        """Write after the hurdle."""
        self.hurdle("write", descriptor)
        super().write(descriptor, data, offset)

    def sync(self, descriptor):
        """The hurdle alone."""
        self.hurdle("sync", descriptor)


def noise(seed):
    """A delta, as `Run.round` sends it."""
    values = np.random.default_rng(seed).standard_normal(SEVEN_CHUNKS.values)
    return values.astype(np.float32)


def contents(run, version):
    """Every file of a version's folder."""
    folder = run.root / "checkpoints" / f"v{version:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def three_versions(run, disk=None):
    """The files of versions 1 to 3."""
    run.start()
    run.open(disk)
    written = []
    for version in range(1, 4):
        run.round(version, "a", "b")
        written.append(contents(run, version))
    run.close()
    return written


@pytest.mark.parametrize("down", ["e4m3", "fp32"])
def test_several_threads_write_what_one_writes(make_run, down):
    """Weights, momentum, residual, update and the digests in the manifest."""
    spec = CodecSpec(format=down)
    alone = three_versions(make_run("alone", SEVEN_CHUNKS, codec_down=spec))
    assert len(alone[2]) == (5 if down == "e4m3" else 4)
    assert three_versions(make_run("more", SEVEN_CHUNKS, codec_down=spec, threads=3)) == alone


@pytest.mark.parametrize("seed", range(5))
def test_a_disk_that_is_slow_now_and_then_changes_nothing(make_run, seed):
    """The next chunk is computed meanwhile, in other memory, and no file gets its chunks in another order."""
    chance = random.Random(seed)

    def hurdle(_name, _descriptor):
        time.sleep(chance.choice([0.0, 0.0, 0.003]))

    alone = three_versions(make_run("alone", SEVEN_CHUNKS))
    slow = three_versions(make_run("slow", SEVEN_CHUNKS, threads=3), Disk(hurdle))
    assert slow == alone


def test_files_are_written_at_the_same_time(make_run):
    """What the threads are for: two writes that wait for each other end only when both run."""
    run = make_run(manifest=SEVEN_CHUNKS, threads=2)
    run.start()
    caller, both, waited = threading.current_thread(), threading.Barrier(2, timeout=20), []

    def hurdle(name, _descriptor):
        if name == "write" and threading.current_thread() is not caller and len(waited) < 2:
            waited.append(name)
            both.wait()

    run.open(Disk(hurdle))
    run.round(1, "a")
    assert waited == ["write", "write"]


@pytest.mark.parametrize("at", [1, 4, 5, 6, 7, 8, 9, 14, 20, 27, 32, 33, 34, 35, 36, 37, 38])
def test_a_write_or_sync_that_fails_in_a_thread_fails_the_commit(make_run, at):
    """And nothing else: the version of before stays, no thread is left at work, and the next try makes the same version."""
    (good, *_) = three_versions(make_run("good", SEVEN_CHUNKS))
    run = make_run("bad", SEVEN_CHUNKS, threads=3)
    run.start()
    lock, calls, at_work = threading.Lock(), [], set()

    def hurdle(name, descriptor):
        with lock:
            calls.append(name)
            at_work.add(threading.current_thread())
            number = len(calls)
        try:
            if failing and number == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(0.001)
        finally:
            with lock:
                at_work.discard(threading.current_thread())

    failing = False
    run.open(Disk(hurdle))
    keys = [DeltaKey(name, 1, 0, 1) for name in "ab"]
    for position, key in enumerate(keys):
        run.send(key, noise(100 + position))
        run.store.accumulate(key, 10.0)
    merged = [MergedDelta(key, 10.0, 0, 10) for key in keys]
    calls.clear()
    failing = True
    with pytest.raises(StoreError, match="No space left on device"):
        run.store.commit(1, merged, 1 / 20)
    assert not at_work
    assert run.store.version == 0
    failing = False
    run.store.commit(1, merged, 1 / 20)
    assert contents(run, 1) == good

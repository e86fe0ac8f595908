"""A version written by several threads: the same bytes, and unchanged state after a failure."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from deltas import merged_of

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.errors import NoWorkerThread, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import rule_named
from fsl_async.store.rules.outer import Average
from fsl_codecs import CodecSpec

CHUNK = 64
"""Seven chunks, the last one shorter."""

SEVEN_CHUNKS = Manifest.from_shapes([("w", (64, 6)), ("b", (17,))])


class Disk(Files):
    """Does not wait for the hardware.

    `hurdle(name, descriptor)` is called before each call that writes; `at_work` lists the threads
    inside one.
    """

    def __init__(self, hurdle):
        self.hurdle = hurdle
        self.at_work = []

    def write(self, descriptor, data, offset):
        """Write after the hurdle."""
        self._do("write", descriptor, lambda: Files.write(self, descriptor, data, offset))

    def sync(self, descriptor):
        """Call the hurdle only."""
        self._do("sync", descriptor, lambda: None)

    def open_existing(self, path, *, writable=False):
        """Open; for writing, after the hurdle."""
        found = []

        def act():
            found.append(Files.open_existing(self, path, writable=writable))

        self._do("open", path, act) if writable else act()
        return found[0]

    def read_into(self, descriptor, buffer, offset):
        """Read after the hurdle."""
        self.hurdle("read", descriptor)
        return super().read_into(descriptor, buffer, offset)

    def _do(self, name, what, act):
        self.at_work.append(threading.current_thread())
        try:
            self.hurdle(name, what)
            act()
        finally:
            self.at_work.remove(threading.current_thread())


def noise(seed):
    """Return a delta as `Run.round` sends it."""
    values = np.random.default_rng(seed).standard_normal(SEVEN_CHUNKS.values)
    return values.astype(np.float32)


def contents(run, version):
    """Return every file of a version's folder."""
    folder = run.root / "checkpoints" / f"v{version:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def three_versions(run, disk=None):
    """Return the files of versions 1 to 3."""
    run.start()
    run.open(disk)
    written = []
    for version in range(1, 4):
        run.round(version, "a", "b")
        written.append(contents(run, version))
    run.close()
    return written


@pytest.mark.parametrize("down", ["e4m3", "fp32"])
def test_several_threads_write_the_same_bytes_as_one(make_run, down):
    """Weights, momentum, residual, mean, update and the digests in the manifest are equal."""
    spec = CodecSpec(format=down)
    alone = three_versions(make_run("alone", SEVEN_CHUNKS, codec_down=spec))
    assert len(alone[2]) == (6 if down == "e4m3" else 5)
    assert three_versions(make_run("more", SEVEN_CHUNKS, codec_down=spec, threads=3)) == alone


WAYS = {
    "as usual": {},
    "fp32": {"codec_down": CodecSpec(format="fp32")},
    "average": {"outer": Average()},
    "median": {"rule": rule_named("median", 0)},
}


def pending(run, disk):
    """Send two deltas; return the list that merges them."""
    run.start()
    run.open(disk)
    keys = [DeltaKey(name, 1, 0, 1) for name in "ab"]
    for position, key in enumerate(keys):
        run.send(key, noise(100 + position))
    return [merged_of(key, 10.0) for key in keys]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [1, 4, 5, 6, 7, 9, 14])
def test_a_failing_call_fails_only_the_commit(make_run, way, at):
    """Only the commit fails: version and threads are as before, and a retry gives the same bytes.

    The first calls are the caller's; the others, two in a row, mostly other threads'.
    """
    good = make_run("good", SEVEN_CHUNKS, **WAYS[way])
    good.start()
    good.round(1, "a", "b")
    lock, calls, failing = threading.Lock(), [], [False]

    def hurdle(name, _what):
        if name == "read" or not failing[0]:
            return
        with lock:
            calls.append(name)
            number = len(calls)
        if number in (at, at + 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.005)

    disk, run = Disk(hurdle), make_run("bad", SEVEN_CHUNKS, threads=3, **WAYS[way])
    merged = pending(run, disk)
    failing[0] = True
    with pytest.raises(StoreError, match="No space left on device"):
        run.store.commit(1, merged, 1 / 20)
    assert not disk.at_work
    assert run.store.version == 0
    failing[0] = False
    run.store.commit(1, merged, 1 / 20)
    assert contents(run, 1) == contents(good, 1)


def test_a_thread_that_cannot_be_started_is_reported(make_run, monkeypatch):
    """The error must not call anything damaged; the start succeeds once threads are available."""
    run = make_run("bad", SEVEN_CHUNKS, threads=3)
    run.start()
    run.close()

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoWorkerThread, match=r"no thread can be started .*codec\.threads to 1"):
            run.open()
    run.open()
    assert run.round(1, "a", "b").version == 1

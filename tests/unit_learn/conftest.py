# ruff: noqa: D102 - the methods mirror those of Files and Store
"""For the store's tests: a disk that fails, kills and forgets on demand, and a run with shorthands."""

import errno
import os
import queue
import shutil
import tempfile
import threading
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from fsl_async.events import DeltaKey
from fsl_async.learn.files import Files
from fsl_async.learn.manifest import Manifest
from fsl_async.learn.records import DeltaMeta, MergedDelta, StoreSettings
from fsl_async.learn.store import Store
from fsl_codecs import CodecSpec, decode, encode

SMALL = Manifest.from_shapes([("w.weight", (10, 5)), ("w.scale", ()), ("w.bias", (9,))])
FP32 = CodecSpec(format="fp32")


class CrashDisk(Files):
    """A disk that counts its changing calls, makes one go wrong, and knows what a power cut would leave.

    `mode`: "after" (the call was made) and "torn" (half of a write) kill the process (SystemExit); "error" lets `failures`
    calls in a row fail, and with `die_after` kills the process that many calls later.

    What is durable is modelled as the least that fsync(2) promises: content as of the last sync of the file, names as of the
    last sync of the folder.
    """

    def __init__(self, root, at=0, mode="after", failures=1, die_after=None):
        self.root, self.at, self.mode, self.failures = root, at, mode, failures
        self.die_after = die_after
        self.calls = []
        self.fired = False
        self.dead = False
        self.opened = {}
        self.ids = count()
        self.folders = {}  # id -> {name: id}, as the process sees it
        self.durable_folders = {}
        self.durable_files = {}
        self.root_id = self._scan(root)

    def _scan(self, path):
        found = next(self.ids)
        if path.is_dir():
            self.folders[found] = {entry.name: self._scan(entry) for entry in path.iterdir()}
            self.durable_folders[found] = dict(self.folders[found])
        else:
            self.durable_files[found] = path.read_bytes()
        return found

    def _id(self, path):
        found = self.root_id
        for part in path.relative_to(self.root).parts:
            found = self.folders[found][part]
        return found

    def _call(self, name, act, torn=None):
        if self.die_after and self.fired and len(self.calls) >= self.at + self.die_after:
            self.dead = True
        if self.dead:
            raise SystemExit("killed")
        self.calls.append(name)
        number = len(self.calls)
        if not self.at or not self.at <= number < self.at + self.failures:
            return act()
        self.fired = True
        if self.mode == "error":
            if torn:
                torn()
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.mode == "torn" and torn:
            torn()
        if self.mode == "after":
            act()
        self.dead = True
        raise SystemExit("killed")

    def make_directory(self, path):
        def act():
            Files.make_directory(self, path)
            if path != self.root:
                inside = self.folders[self._id(path.parent)]
                if path.name not in inside:
                    inside[path.name] = next(self.ids)
                    self.folders[inside[path.name]] = {}

        self._call("make_directory", act)

    def create(self, path):
        def act():
            descriptor = Files.create(self, path)
            inside = self.folders[self._id(path.parent)]
            self.opened[descriptor] = inside.setdefault(path.name, next(self.ids))
            return descriptor

        return self._call("create", act)

    def write(self, descriptor, data, offset):
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        self._call(
            "write",
            lambda: Files.write(self, descriptor, data, offset),
            lambda: Files.write(self, descriptor, half, offset),
        )

    def truncate(self, descriptor, size):
        self._call("truncate", lambda: Files.truncate(self, descriptor, size))

    def sync(self, descriptor):
        def act():
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            self.durable_files[self.opened[descriptor]] = content

        self._call("sync", act)

    def sync_directory(self, path):
        def act():
            found = self._id(path)
            self.durable_folders[found] = dict(self.folders[found])

        self._call("sync_directory", act)

    def rename(self, source, target):
        def act():
            Files.rename(self, source, target)
            moved = self.folders[self._id(source.parent)].pop(source.name)
            self.folders[self._id(target.parent)][target.name] = moved

        self._call("rename", act)

    def remove(self, path):
        def act():
            Files.remove(self, path)
            del self.folders[self._id(path.parent)][path.name]

        self._call("remove", act)

    def remove_directory(self, path):
        def act():
            Files.remove_directory(self, path)
            del self.folders[self._id(path.parent)][path.name]

        self._call("remove_directory", act)

    def open_existing(self, path, *, writable=False):
        descriptor = super().open_existing(path, writable=writable)
        self.opened[descriptor] = self._id(path)
        return descriptor

    def close(self, descriptor):
        if self.opened.pop(descriptor, None) is not None:
            super().close(descriptor)

    def bury(self, power=None):
        """The process is gone. `power`: "names" keeps the names and loses what was not synced, "all" loses names too."""
        for descriptor in list(self.opened):
            self.close(descriptor)
        if power:
            folders = self.durable_folders if power == "all" else self.folders
            shutil.rmtree(self.root)
            self._rebuild(self.root, self.root_id, folders)

    def _rebuild(self, path, found, folders):
        if found in self.folders:
            path.mkdir()
            for name, inside in folders.get(found, {}).items():
                self._rebuild(path / name, inside, folders)
        else:
            path.write_bytes(self.durable_files.get(found, b""))


@pytest.fixture
def run_root(tmp_path):
    """A folder in memory where there is one: thousands of small files on a shared disk would take minutes."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def crash_disk():
    """The class of disks that go wrong."""
    return CrashDisk


class Quiet(Files):
    """A disk that does not wait for the hardware."""

    def sync(self, descriptor):
        """Do nothing."""


def noise(manifest, seed):
    return np.random.default_rng(seed).standard_normal(manifest.values).astype(np.float32)


def frames_of(manifest, vector, spec=FP32):
    spans = (manifest.chunk_range(index) for index in range(manifest.chunks))
    return [encode(vector[start:stop], spec) for start, stop in spans]


class Run:
    """A store with shorthands."""

    def __init__(self, root, manifest=SMALL, **options):
        self.root = root
        self.manifest = manifest
        self.settings = StoreSettings(**options)
        self.store = None

    def open(self, files=None, **options):
        self.close()
        self.store = Store(self.root, self.settings, files=files or Quiet(), **options)
        return self.store.recover()

    def close(self):
        if self.store is not None:
            self.store.close()
        self.store = None

    def start(self, seed=0):
        self.open()
        self.store.begin_initial(self.manifest)
        for index, frame in enumerate(frames_of(self.manifest, noise(self.manifest, seed))):
            self.store.write_initial(index, frame)
        return self.store.finish_initial()

    def send(self, key, vector, tokens=10, spec=FP32):
        meta = DeltaMeta(tokens=tokens, steps=2, base_digest=self.store.digest, round=1)
        assert self.store.spool_begin(key, meta) is None
        for index, frame in enumerate(frames_of(self.manifest, vector, spec)):
            self.store.spool_write(key, index, frame)
        return self.store.spool_finish(key)

    def commit(self, *keys, tokens=10):
        for key in keys:
            self.store.accumulate(key, float(tokens))
        merged = [MergedDelta(key, float(tokens), 0, tokens) for key in keys]
        return self.store.commit(self.store.version + 1, merged, 1 / (tokens * len(keys)))

    def round(self, version, *names):
        keys = [DeltaKey(name, 1, version - 1, version) for name in names]
        for position, key in enumerate(keys):
            self.send(key, noise(self.manifest, 100 * version + position))
        return self.commit(*keys)

    def weights(self, version):
        chunks = [self.store.read_full(version, i) for i in range(self.manifest.chunks)]
        return np.concatenate([decode(chunk) for chunk in chunks])


@pytest.fixture
def make_run(run_root):
    """Makes runs below the test's folder, and closes them in the end."""
    made = []

    def make(name="run", manifest=SMALL, **options):
        made.append(Run(run_root / name, manifest, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture
def run(make_run):
    """A run of a small model, not started."""
    return make_run()


@pytest.fixture
def in_thread():
    """Run work in a thread; gives a function that waits for it and returns its result or raises its error."""

    def start(work):
        answer = queue.Queue()

        def run():
            try:
                answer.put((work(), None))
            except Exception as error:  # noqa: BLE001
                answer.put((None, error))

        thread = threading.Thread(target=run)
        thread.start()

        def wait():
            result, error = answer.get(timeout=20)
            thread.join(20)
            if error is not None:
                raise error
            return result

        return wait

    return start

# ruff: noqa: D102 - the methods mirror those of Store
"""Fixtures of the store's tests: a run with shorthands."""

import copy
import json
import os
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from adapter_runs import LOSSY, SCALE, Tuning, model
from deltas import delta_of, merged_of, noise

from fsl_async.files.files import Files
from fsl_async.files.memory_files import Faults, Killed, MemoryDisk, MemoryFiles
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.errors import StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import RULES
from fsl_async.store.rules.outer import Average
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, decode, encode

SMALL = Manifest.from_shapes([("w.weight", (10, 5)), ("w.scale", ()), ("w.bias", (9,))])
FP32 = CodecSpec(format="fp32")


@pytest.fixture(autouse=True)
def small_chunks(request, monkeypatch):
    """Cut vectors into chunks of the module's CHUNK values, where it has one."""
    if values := getattr(request.module, "CHUNK", None):
        monkeypatch.setattr("fsl_async.store.model.manifest.CHUNK_VALUES", values)


@pytest.fixture
def run_root(tmp_path):
    """A folder in memory where possible: thousands of small files on a shared disk take minutes."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


class Quiet(Files):
    """A disk that does not wait for the hardware."""

    def sync(self, descriptor):
        """Do nothing."""


def frames_of(manifest, vector, spec=FP32):
    frames = []
    for index in range(manifest.chunks):
        start, stop = manifest.chunk_range(index)
        frames.append(encode(vector[start:stop], FP32 if manifest.is_buffer(index) else spec))
    return frames


class Run:
    """A store with shorthands."""

    def __init__(self, root, manifest=SMALL, **options):
        self.root = root
        self.manifest = manifest
        has_thread = options.pop("snapshot_thread", False)
        self.later = None if has_thread else lambda write: write()
        self.settings = StoreSettings(**options)
        self.store = None

    def open(self, files=None, **options):
        self.close()
        more = {"files": files or Quiet(), "later": self.later} | options
        self.store = Store(self.root, self.settings, **more)
        return self.store.recover()

    def close(self):
        if self.store is not None:
            self.store.close()
        self.store = None

    def start(self, seed=0):
        self.open()
        return self.publish(seed)

    def publish(self, seed=0):
        self.store.begin_initial(self.manifest)
        for index, frame in enumerate(frames_of(self.manifest, noise(self.manifest, seed))):
            self.store.write_initial(index, frame)
        return self.store.finish_initial()

    def send(self, key, vector, tokens=10, spec=FP32, metrics=None):
        one = delta_of(key, tokens, base_digest=self.store.digest, number=1, metrics=metrics)
        assert self.store.spool_begin(one) is None
        for index, frame in enumerate(frames_of(self.manifest, vector, spec)):
            self.store.spool_write(key, index, frame)
        return self.store.spool_finish(key)

    def commit(self, *keys, tokens=10):
        members = [merged_of(key, float(tokens), tokens=tokens) for key in keys]
        return self.store.commit(self.store.version + 1, members, 1 / (tokens * len(keys)))

    def noise(self, seed):
        return noise(self.manifest, seed)

    def round(self, version, *names):
        keys = [DeltaKey(name, 1, version - 1, version) for name in names]
        for position, key in enumerate(keys):
            self.send(key, noise(self.manifest, 100 * version + position))
        return self.commit(*keys)

    def deaths(self, play, calls=None, *, mode="after", powers=(None,)):
        """Let `play` fail in each call that it makes on a copy of the folder in memory; `powers`
        take turns. Yields what the next start recovers each time: the store is open then, and
        `facts` has its ledger. The last play has no failure.
        """
        self.close()
        self.root.mkdir(exist_ok=True)
        disk = MemoryDisk()
        disk.read_from(self.root, self.root)
        for at in calls or count(1):
            died, power = copy.deepcopy(disk), powers[at % len(powers)]
            files = MemoryFiles(died, Faults(at, mode))
            try:
                play(files)
            except Killed:
                pass
            except (StoreError, OSError):
                assert mode == "error"
            if self.store is not None and self.store._parts is not None:
                self.store._parts.run.pool.close()
            self.store = None
            files.die()
            if power is not None:
                died.lose_power(power)
            self.files = MemoryFiles(died)
            yield self.open(self.files)
            self.close()
            if not files.faults.fired:
                return

    def facts(self):
        """Return the lines of the ledger in memory."""
        lines = self.files.read_whole(self.root / "ledger.jsonl", 1 << 20).splitlines()
        return [json.loads(line) for line in lines]

    def weights(self, version):
        chunks = [self.store.read_full(version, i) for i in range(self.manifest.chunks)]
        return np.concatenate([decode(chunk) for chunk in chunks])


@pytest.fixture
def make_run(run_root):
    """Create runs below the test's folder; close them at the end."""
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
def tuning(make_run):
    """Make runs of adapters."""

    def make(rule="bank", name="run", manifest=None, **options):
        options = {"codec_down": LOSSY, "outer": Average(), "snapshot_thread": True} | options
        run = make_run(
            name, manifest=manifest or model(rule), adapters=RULES[rule](),
            adapter_scale=SCALE, adapter_seed=7, **options,
        )  # fmt: skip
        return Tuning(run, rule)

    return make

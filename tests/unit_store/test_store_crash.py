"""Crashes that no run of `tests/unit_crash` has: during a rollback that an operator asks for, and
while a real thread writes a checkpoint.
"""

import threading
from contextlib import suppress

import pytest

from fsl_async.files.memory_files import Faults, Killed, MemoryDisk, MemoryFiles
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.model import manifest as manifest_module
from fsl_codecs import CodecSpec

LAST = 3
OPTIONS = {
    "keep_versions": 2,
    "codec_down": CodecSpec(format="e4m3", entropy=False),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two chunks per vector, so that every loop over chunks is a loop."""
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", 32)


def to_the_end(run):
    """Make the versions up to LAST, from any state; return the digest of the last."""
    if run.store.version < 0:
        run.publish()
    while run.store.version < LAST:
        base = run.store.version
        keys = [DeltaKey(name, 1, base, base + 1) for name in "ab"]
        for number, key in enumerate(keys):
            if run.store.known(key) is None:
                run.send(key, run.noise(100 * base + number))
        run.commit(*keys)
    return run.store.digest


@pytest.mark.parametrize("power", [None, "all", 1])
def test_a_crash_during_a_rollback_is_finished_by_the_next_start(make_run, power):
    """An interrupted rollback must never mix two lineages."""
    run = make_run(**OPTIONS)
    run.open()
    digest = to_the_end(run)

    def play(files):
        run.open(files, from_version=LAST - 1)

    crashes = 0
    for found in run.deaths(play, powers=(power,)):
        rolled_back = any(fact["fact"] == "rollback" for fact in run.facts())
        assert found.version == LAST - rolled_back
        recovered = run.open(run.files, from_version=LAST - 1)
        assert {delta.key.base for delta in recovered.pending} == {LAST - 1}
        assert sum(fact["fact"] == "rollback" for fact in run.facts()) == 1
        folders = run.files.names(run.root / "checkpoints")
        assert [name for name in folders if name.startswith("rolled")] == [
            "rolled-back-1-v00000003"
        ]
        assert to_the_end(run) == digest
        crashes += 1
    assert crashes > 4


@pytest.mark.parametrize(("mode", "power"), [("torn", None), ("after", "all"), ("after", 1)])
def test_a_crash_while_a_thread_writes_a_checkpoint_loses_nothing(
    make_run, monkeypatch, tmp_path, mode, power
):
    """It stops the store in any call, and the checkpoint wherever it is."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # threads die of `Killed`
    run, digests, others = make_run(snapshot_thread=True, threads=2, **OPTIONS), set(), 0
    for at in range(1, 200, 3):
        disk = MemoryDisk()
        disk.read_from(run.root.parent, run.root.parent)
        faults = Faults(at, mode, order=at)
        files = MemoryFiles(disk, faults)
        with suppress(Killed):
            run.open(files)
            to_the_end(run)
        if run.store._parts is not None:
            run.store._parts.run.pool.close()
        run.store = None
        files.die()
        for thread in threading.enumerate():
            if thread.name == "snapshot":
                thread.join()
        others += faults.by_others[-1]
        if power is not None:
            disk.lose_power(power)
        run.open(MemoryFiles(disk))
        digests.add(to_the_end(run))
        run.close()
    assert len(digests) == 1
    assert others > 2, "the crash must fall on the threads too"
    disk.write_to(tmp_path, run.root)

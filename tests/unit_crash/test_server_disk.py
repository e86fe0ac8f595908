"""The split server's folder: what a start finds, also after a crash, a power cut or a full disk at
every call to the disk.

A scenario (six uploads, a checkpoint after each two, two kept) runs on a disk that counts its
calls; then again for each call and each kind of failure. Points of `crash_split` are effects, not
disk calls.
"""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsl_async.errors import RunDirError
from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.files.memory_files import Faults, Killed, MemoryDisk, MemoryFiles
from fsl_async.learn.split.server_disk import KEPT, LEDGER, ServerDisk
from fsl_async.observe.ledger_audit import audit_split
from fsl_async.roles.split.events import ClientProgress, SplitProgress
from fsl_async.roles.split.messages import UploadKey

FOLDER = Path("/server")
KEYS = [UploadKey("a", 7, 0, step) for step in range(6)]
EVERY = 2


def tensors(uploads):
    return {
        "server/w": torch.full((2, 3), float(uploads)),
        "server/flags": torch.full((3,), uploads > 2),
        "server/h": torch.full((2,), float(uploads), dtype=torch.bfloat16),
        "server/none": torch.zeros((0, 3)),
        "steps": torch.tensor(uploads),
    }


def book(uploads):
    last = KEYS[uploads - 1] if uploads else None
    return SplitProgress("run-1", 0, -1, uploads, {"a": ClientProgress(7, last, 0)})


def same(found, wanted):
    pairs = [(found.pop(name), one) for name, one in wanted.items()]
    return not found and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def retry(act, *errors):
    for _ in range(12):
        try:
            return act()
        except errors as error:
            last = error
    raise last


def play(files, reported=None, end=6):
    """Run one process from the folder's state to upload `end`; False when it was killed.

    reported: what the split server reports outside.
    """
    reported = reported or SimpleNamespace(durable=0, trained=0)
    try:
        disk = retry(lambda: ServerDisk(FOLDER, files), RunDirError)
        found = disk.recover()
        for key in found.recovered.lost:
            disk.append("upload", key=key.text, outcome="dropped", reason="the server died")
        for uploads in range(found.recovered.progress.uploads + 1, end + 1):
            disk.append("upload", key=KEYS[uploads - 1].text, outcome="trained", reason="")
            reported.trained = max(reported.trained, uploads)
            if uploads % EVERY == 0:
                version = max(found.recovered.auxiliary_seen.get("a", -1), 0) + uploads
                disk.append("auxiliary", client="a", version=version)
                content = book(uploads), tensors(uploads), [("a", tensors(10 + uploads))]
                retry(lambda content=content: disk.stage(*content)(), OSError)
                reported.durable = uploads
        disk.close()
    except Killed:
        return False
    return True


def recovered(disk):
    """Return what a new split server finds."""
    server = ServerDisk(FOLDER, MemoryFiles(disk))
    try:
        return server.recover()
    finally:
        server.close()


def audit(disk):
    lines = disk.file(FOLDER / LEDGER).content.splitlines()
    return audit_split(filter(None, map(from_checksummed, map(bytes, lines))), [])


def check(disk, reported, power=None):
    """Check that a new split server finds a state of the scenario, with everything reported
    durable.
    """
    found = recovered(disk)
    uploads = found.recovered.progress.uploads
    assert reported.durable <= uploads <= reported.durable + EVERY
    assert found.recovered.progress == (book(uploads) if uploads else SplitProgress())
    if uploads:
        assert same(found.common, tensors(uploads))
        assert same(dict(found.clients)["a"], tensors(10 + uploads))
    known = [key for key in KEYS[uploads : reported.trained] if key in found.recovered.lost]
    if power is None:
        assert len(known) >= reported.trained - uploads - 1, "a line was lost with the process"
    assert audit(disk).problems == ()


def check_end(disk):
    """Check the end: everything trained once in the lineage, two checkpoints, no temporary
    files.
    """
    assert recovered(disk).recovered.progress == book(len(KEYS))
    assert (audit(disk).trained, audit(disk).problems) == (len(KEYS), ())
    names = MemoryFiles(disk).names(FOLDER / "checkpoints")
    assert len(names) == KEPT
    assert not any(name.startswith("tmp-") for name in names)


@pytest.fixture(scope="module")
def calls():
    """The calls of a run without faults."""
    files = MemoryFiles(MemoryDisk())
    assert play(files)
    check_end(files.disk)
    return files.faults.calls


# Dying before a call is dying after the one before it.
@pytest.mark.parametrize(
    ("mode", "power"),
    [("after", None), ("torn", None), ("after", "all"), ("after", "names"), ("after", 1)],
)
def test_a_crash_at_any_call_loses_nothing_durable(calls, mode, power):
    """After a crash the next split server goes on from a complete checkpoint and lists what was
    trained after it.
    """
    assert len(calls) > 60
    for at, name in enumerate(calls, start=1):
        if mode == "torn" and name != "write":
            continue
        files = MemoryFiles(MemoryDisk(), Faults(at, mode))
        reported = SimpleNamespace(durable=0, trained=0)
        assert not play(files, reported)
        files.die()
        if power is not None:
            files.disk.lose_power(power)
        check(files.disk, reported, power)
        assert play(MemoryFiles(files.disk))
        check_end(files.disk)


@pytest.mark.parametrize("failures", [1, 6])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_can_be_tried_again(calls, failures, number):
    """A failed checkpoint is tried again; no line of the ledger is missing, doubled or torn, and
    one that could not be written waits for the next.
    """
    for at in range(1, len(calls) + 1):
        faults = Faults(at, "error", failures=failures, number=number)
        files = MemoryFiles(MemoryDisk(), faults)
        assert play(files)
        assert faults.fired
        check_end(files.disk)


@pytest.fixture
def disk():
    """A disk with checkpoints of 2 and 4 uploads, and a line of the fifth."""
    files = MemoryFiles(MemoryDisk())
    assert play(files, end=5)
    return files.disk


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(disk):
    """A flipped bit loses the uploads since the checkpoint before, not the run."""
    assert recovered(disk).recovered.lost == (KEYS[4],)
    assert recovered(disk).recovered.auxiliary_seen == {"a": 4}
    disk.file(FOLDER / "checkpoints/c00000002/common.safetensors").content[-1] ^= 1
    found = recovered(disk)
    assert found.recovered.progress == book(2)
    assert found.recovered.lost == tuple(KEYS[2:5])
    disk.file(FOLDER / "checkpoints/c00000001/manifest.json").content[9] ^= 1
    with pytest.raises(RunDirError, match="no checkpoint of the split server is intact"):
        recovered(disk)


def test_a_ledger_that_lacks_lines_of_the_checkpoint_is_refused(disk):
    """The lines after the checkpoint would be taken for lines before it, and uploads that are lost
    for trained. Without a ledger a new one begins.
    """
    ledger = disk.file(FOLDER / LEDGER).content
    del ledger[ledger.index(b"\n") + 1 :]
    with pytest.raises(RunDirError, match="lacks lines that checkpoint 2 counts"):
        recovered(disk)
    ledger.clear()
    assert recovered(disk).recovered.progress == book(4)


def test_two_servers_do_not_share_a_folder(disk):
    """Two writers would mix their weights."""
    files = MemoryFiles(disk)
    server = ServerDisk(FOLDER, files)
    with pytest.raises(RunDirError, match="another process uses"):
        ServerDisk(FOLDER, files)
    server.close()

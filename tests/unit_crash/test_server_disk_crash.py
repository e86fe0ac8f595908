"""The split server's folder survives a crash, a power cut or a full disk at every call to the disk.

A scenario (six uploads, a sequence number assigned, three checkpoints, two kept) runs on a disk
that counts its calls; then again for each call and each kind of failure. After each the folder is
opened again, and what was promised is checked.
"""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from crash_disk import CrashDisk
from crash_kinds import folder

from fsl_async.errors import RunDirError
from fsl_async.learn.split.server_disk import KEPT, ServerDisk
from fsl_async.observe.split_audit import audit_split_dir
from fsl_async.roles.split.events import ClientProgress, SplitProgress, UploadKey
from fsl_async.store.files import Files

KEYS = [UploadKey("a", 7, 0, step) for step in range(6)]
EVERY = 2


def tensors(uploads):
    return {"server/w": torch.full((3,), float(uploads)), "steps": torch.tensor(uploads)}


def book(uploads):
    last = KEYS[uploads - 1] if uploads else None
    return SplitProgress("run-1", 0, -1, uploads, {"a": ClientProgress(7, last, 0)})


class Reported:
    """What the split server has reported outside."""

    def __init__(self):
        self.durable = 0  # uploads in a sealed checkpoint
        self.trained = 0
        self.failures = 0


def retry(act, reported, errors):
    for _ in range(12):
        try:
            return act()
        except errors as error:
            reported.failures += 1
            last = error
    raise last


def run_scenario(root, files, reported):
    """Run one incarnation from the folder's state to the end of the scenario; False when it was
    killed.
    """
    try:
        disk = retry(lambda: ServerDisk(root / "server", files), reported, RunDirError)
        found = retry(disk.recover, reported, RunDirError)
        uploads = found.book.uploads
        for key in found.lost:
            disk.append(key.text, "dropped", "the server died")
        while uploads < len(KEYS):
            disk.append(KEYS[uploads].text, "trained", "")
            uploads += 1
            reported.trained = max(reported.trained, uploads)
            if uploads % EVERY == 0:
                disk.append_auxiliary("a", max(found.auxiliary_seen.get("a", -1), 0) + uploads)

                def checkpoint(uploads=uploads):
                    mine = [("a", tensors(uploads))]
                    disk.seal(disk.stage(book(uploads), tensors(uploads), mine))

                retry(checkpoint, reported, OSError)
                reported.durable = uploads
        disk.close()
    except SystemExit:
        return False
    return True


def check(root, reported, power):
    """Check that a new split server finds a state of the scenario, with everything reported
    durable.
    """
    disk = ServerDisk(root / "server")
    found = disk.recover()
    disk.close()
    uploads = found.book.uploads
    assert reported.durable <= uploads <= reported.durable + EVERY
    assert found.book == (book(uploads) if uploads else SplitProgress())
    if uploads:
        assert torch.equal(found.common["server/w"], tensors(uploads)["server/w"])
        assert torch.equal(found.clients["a"]["steps"], tensors(uploads)["steps"])
    known = [key for key in KEYS[uploads : reported.trained] if key in found.lost]
    if power is None:
        assert len(known) >= reported.trained - uploads - 1, "a line was lost with the process"
    assert audit_split_dir(root / "server").problems == ()


def check_end(root):
    """Check the end: everything trained once in the lineage, two checkpoints, no temporary
    files.
    """
    audit = audit_split_dir(root / "server")
    assert (audit.trained, audit.problems) == (len(KEYS), ())
    disk = ServerDisk(root / "server")
    assert disk.recover().book == book(len(KEYS))
    disk.close()
    names = {path.name for path in (root / "server" / "checkpoints").iterdir()}
    assert len(names) == KEPT
    assert not any(name.startswith("tmp-") for name in names)


def calls(root):
    disk = CrashDisk(root)
    assert run_scenario(root, disk, Reported())
    check_end(root)
    shutil.rmtree(root / "server")
    return disk.calls


@pytest.fixture
def root():
    with folder() as made:
        yield Path(made)


# Dying before a call is dying after the one before it.
@pytest.mark.parametrize(
    ("mode", "power"),
    [("after", None), ("torn", None), ("after", "all"), ("after", "names"), ("after", 1)],
)
def test_a_crash_at_any_call_loses_nothing_durable(root, mode, power):
    """After a crash the next split server goes on from a complete checkpoint and lists what was
    trained after it.
    """
    made = calls(root)
    assert len(made) > 60
    for at, name in enumerate(made, start=1):
        if mode == "torn" and name != "write":
            continue
        disk, reported = CrashDisk(root, at, mode), Reported()
        assert not run_scenario(root, disk, reported)
        disk.bury(power)
        check(root, reported, power)
        assert run_scenario(root, Files(), reported)
        check_end(root)
        shutil.rmtree(root / "server")


@pytest.mark.parametrize("failures", [1, 6])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_can_be_tried_again(root, failures, number):
    """A failed checkpoint is tried again; no line of the ledger is missing, doubled or torn."""
    for at in range(1, len(calls(root)) + 1):
        disk, reported = CrashDisk(root, at, "error", failures, number=number), Reported()
        assert run_scenario(root, disk, reported)
        assert disk.fired
        check(root, reported, None)
        check_end(root)
        shutil.rmtree(root / "server")


def test_a_line_that_could_not_be_written_waits(root):
    """An error in appending a ledger line would skip the effects after it: the line waits
    instead.
    """
    disk = ServerDisk(root / "server", files := CrashDisk(root))
    disk.recover()
    files.at, files.mode, files.failures = len(files.calls) + 1, "error", 1
    disk.append(KEYS[0].text, "trained", "")
    assert audit_split_dir(root / "server").trained == 0
    disk.append(KEYS[1].text, "trained", "")
    assert audit_split_dir(root / "server").trained == 2
    disk.close()

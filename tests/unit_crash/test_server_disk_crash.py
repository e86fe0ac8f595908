"""The split server's folder survives a crash, a power cut or a full disk at every call to the disk.

A scenario (six uploads, a sequence number assigned, three checkpoints, two kept) runs on a disk
that counts its calls; then again for each call and each kind of failure. After each the folder is
opened again, and what was promised is checked. Points of `crash_split` are effects, not disk calls.
"""

import errno
import shutil
from pathlib import Path

import pytest
import torch

from fsl_async.errors import RunDirError
from fsl_async.files.memory_files import Faults, Killed, MemoryDisk, MemoryFiles
from fsl_async.learn.split.server_disk import KEPT, ServerDisk
from fsl_async.observe.split_audit import audit_split_dir
from fsl_async.roles.split.events import ClientProgress, SplitProgress, UploadKey

FOLDER = Path("/server")
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


def run_scenario(files, reported):
    """Run one incarnation from the folder's state to the end of the scenario; False when it was
    killed.
    """
    try:
        disk = retry(lambda: ServerDisk(FOLDER, files), reported, RunDirError)
        found = retry(disk.recover, reported, RunDirError)
        uploads = found.book.uploads
        for key in found.lost:
            disk.append("upload", key=key.text, outcome="dropped", reason="the server died")
        while uploads < len(KEYS):
            disk.append("upload", key=KEYS[uploads].text, outcome="trained", reason="")
            uploads += 1
            reported.trained = max(reported.trained, uploads)
            if uploads % EVERY == 0:
                disk.append(
                    "auxiliary",
                    client="a",
                    version=max(found.auxiliary_seen.get("a", -1), 0) + uploads,
                )

                def checkpoint(uploads=uploads):
                    mine = [("a", tensors(uploads))]
                    disk.stage(book(uploads), tensors(uploads), mine)()

                retry(checkpoint, reported, OSError)
                reported.durable = uploads
        disk.close()
    except Killed:
        return False
    return True


def check(disk, reported, power, audit):
    """Check that a new split server finds a state of the scenario, with everything reported
    durable.
    """
    server = ServerDisk(FOLDER, MemoryFiles(disk))
    found = server.recover()
    server.close()
    uploads = found.book.uploads
    assert reported.durable <= uploads <= reported.durable + EVERY
    assert found.book == (book(uploads) if uploads else SplitProgress())
    if uploads:
        assert torch.equal(found.common["server/w"], tensors(uploads)["server/w"])
        assert torch.equal(dict(found.clients)["a"]["steps"], tensors(uploads)["steps"])
    known = [key for key in KEYS[uploads : reported.trained] if key in found.lost]
    if power is None:
        assert len(known) >= reported.trained - uploads - 1, "a line was lost with the process"
    assert audit(disk).problems == ()


def check_end(disk, audit):
    """Check the end: everything trained once in the lineage, two checkpoints, no temporary
    files.
    """
    found = audit(disk)
    assert (found.trained, found.problems) == (len(KEYS), ())
    files = MemoryFiles(disk)
    server = ServerDisk(FOLDER, files)
    assert server.recover().book == book(len(KEYS))
    server.close()
    names = files.names(FOLDER / "checkpoints")
    assert len(names) == KEPT
    assert not any(name.startswith("tmp-") for name in names)


def calls(audit):
    files = MemoryFiles(MemoryDisk())
    assert run_scenario(files, Reported())
    check_end(files.disk, audit)
    return files.faults.calls


@pytest.fixture
def audit(tmp_path):
    """Make audits of a split server's folder on a disk."""

    def made(disk):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        disk.write_to(tmp_path, FOLDER)
        return audit_split_dir(tmp_path)

    return made


# Dying before a call is dying after the one before it.
@pytest.mark.parametrize(
    ("mode", "power"),
    [("after", None), ("torn", None), ("after", "all"), ("after", "names"), ("after", 1)],
)
def test_a_crash_at_any_call_loses_nothing_durable(audit, mode, power):
    """After a crash the next split server goes on from a complete checkpoint and lists what was
    trained after it.
    """
    made = calls(audit)
    assert len(made) > 60
    for at, name in enumerate(made, start=1):
        if mode == "torn" and name != "write":
            continue
        files, reported = MemoryFiles(MemoryDisk(), Faults(at, mode)), Reported()
        assert not run_scenario(files, reported)
        files.die()
        if power is not None:
            files.disk.lose_power(power)
        check(files.disk, reported, power, audit)
        assert run_scenario(MemoryFiles(files.disk), reported)
        check_end(files.disk, audit)


@pytest.mark.parametrize("failures", [1, 6])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_can_be_tried_again(audit, failures, number):
    """A failed checkpoint is tried again; no line of the ledger is missing, doubled or torn."""
    for at in range(1, len(calls(audit)) + 1):
        faults = Faults(at, "error", failures=failures, number=number)
        files, reported = MemoryFiles(MemoryDisk(), faults), Reported()
        assert run_scenario(files, reported)
        assert faults.fired
        check(files.disk, reported, None, audit)
        check_end(files.disk, audit)


def test_a_line_that_could_not_be_written_waits(audit):
    """An error in appending a ledger line would skip the effects after it: the line waits
    instead.
    """
    files = MemoryFiles(MemoryDisk(), Faults(mode="error"))
    server = ServerDisk(FOLDER, files)
    server.recover()
    files.faults.at = len(files.faults.calls) + 1
    server.append("upload", key=KEYS[0].text, outcome="trained", reason="")
    assert audit(files.disk).trained == 0
    server.append("upload", key=KEYS[1].text, outcome="trained", reason="")
    assert audit(files.disk).trained == 2
    server.close()

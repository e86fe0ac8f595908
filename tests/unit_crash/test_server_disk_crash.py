"""The split server's folder survives a crash, a power cut or a full disk at every call to the disk.

A scenario (six uploads, a number given away, three checkpoints, two kept) runs on a disk that
counts its calls; then again for each call and each way in which it can go wrong. After each the
folder is opened again, and what was promised is checked.
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


class Told:
    """What the world outside heard."""

    def __init__(self):
        self.durable = 0  # uploads in a checkpoint that was sealed
        self.trained = 0
        self.failures = 0


def patiently(act, told, errors):
    for _ in range(12):
        try:
            return act()
        except errors as error:
            told.failures += 1
            last = error
    raise last


def live(root, files, told):
    """One life of the server, from wherever the folder is to the end of the scenario; False when it
    was killed.
    """
    try:
        disk = patiently(lambda: ServerDisk(root / "server", files), told, RunDirError)
        found = patiently(disk.recover, told, RunDirError)
        uploads = found.book.uploads
        for key in found.lost:
            disk.append(key.text, "dropped", "the server died")
        while uploads < len(KEYS):
            disk.append(KEYS[uploads].text, "trained", "")
            uploads += 1
            told.trained = max(told.trained, uploads)
            if uploads % EVERY == 0:
                disk.append_auxiliary("a", max(found.auxiliary_seen.get("a", -1), 0) + uploads)

                def checkpoint(uploads=uploads):
                    mine = [("a", tensors(uploads))]
                    disk.seal(disk.stage(book(uploads), tensors(uploads), mine))

                patiently(checkpoint, told, OSError)
                told.durable = uploads
        disk.close()
    except SystemExit:
        return False
    return True


def check(root, told, power):
    """What a new server finds is a moment of the scenario, and nothing that was said to be durable
    is missing.
    """
    disk = ServerDisk(root / "server")
    found = disk.recover()
    disk.close()
    uploads = found.book.uploads
    assert told.durable <= uploads <= told.durable + EVERY
    assert found.book == (book(uploads) if uploads else SplitProgress())
    if uploads:
        assert torch.equal(found.common["server/w"], tensors(uploads)["server/w"])
        assert torch.equal(found.clients["a"]["steps"], tensors(uploads)["steps"])
    known = [key for key in KEYS[uploads : told.trained] if key in found.lost]
    if power is None:
        assert len(known) >= told.trained - uploads - 1, "a line was lost with the process"
    assert audit_split_dir(root / "server").problems == ()


def check_end(root):
    """However it was reached: everything trained once in the lineage, two checkpoints, nothing left
    lying about.
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
    assert live(root, disk, Told())
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
    """Whenever the server dies, the next one goes on from a whole checkpoint, and knows what was
    trained after it.
    """
    made = calls(root)
    assert len(made) > 60
    for at, name in enumerate(made, start=1):
        if mode == "torn" and name != "write":
            continue
        disk, told = CrashDisk(root, at, mode), Told()
        assert not live(root, disk, told)
        disk.bury(power)
        check(root, told, power)
        assert live(root, Files(), told)
        check_end(root)
        shutil.rmtree(root / "server")


@pytest.mark.parametrize("failures", [1, 6])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_can_be_tried_again(root, failures, number):
    """A full disk costs a checkpoint, which is tried again; no line of the ledger is left out,
    doubled, or torn.
    """
    for at in range(1, len(calls(root)) + 1):
        disk, told = CrashDisk(root, at, "error", failures, number=number), Told()
        assert live(root, disk, told)
        assert disk.fired
        check(root, told, None)
        check_end(root)
        shutil.rmtree(root / "server")


def test_a_line_that_could_not_be_written_waits(root):
    """Entering a line happens amid other effects: an error there would leave out what comes after
    it, and the run with it.
    """
    disk = ServerDisk(root / "server", files := CrashDisk(root))
    disk.recover()
    files.at, files.mode, files.failures = len(files.calls) + 1, "error", 1
    disk.append(KEYS[0].text, "trained", "")
    assert audit_split_dir(root / "server").trained == 0
    disk.append(KEYS[1].text, "trained", "")
    assert audit_split_dir(root / "server").trained == 2
    disk.close()

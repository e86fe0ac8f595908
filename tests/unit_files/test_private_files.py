"""Modes of a run's folders and files, and the errors where none can be created."""

import errno
import os
import stat

import pytest

from fsl_async import cli
from fsl_async.cluster.relauncher import MembersFile
from fsl_async.config.fixed import keep_settings
from fsl_async.config.load import load
from fsl_async.errors import disk_words
from fsl_async.files.files import Files, make_folder, replace_bytes
from fsl_async.keys.access_control import NameHolders
from fsl_async.observe import segments
from fsl_async.observe.journal import JournalWriter
from fsl_async.store.disk.folders import make_durable_folder
from fsl_async.store.store import Store
from fsl_async.tools.sim.training import MANIFEST


@pytest.fixture(autouse=True)
def open_umask():
    """A umask, usual on shared machines, that keeps the group's permissions."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    """Return the mode of every folder and file below."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def test_everything_in_a_run_directory_is_its_owners(tmp_path, monkeypatch):
    """Weights and deltas reveal a site's data, and other users of a machine must not read them."""
    run = tmp_path / "runs" / "one"
    store = Store(run)
    store.recover()
    store.run.start_run("one")
    store.begin_initial(MANIFEST)
    keep_settings(run, load(None), -1)
    MembersFile(run / "members.json").write({"a"})
    NameHolders(run / "names.txt").hold("a", "k" * 40)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 200)
    with JournalWriter(run / "clients" / "a" / "journal.jsonl") as journal:
        journal.note("Begun", 0.0)
    journal_file = run / "clients" / "a" / "journal.jsonl"
    os.close(segments.turn(journal_file, b"{}\n", ["key"]))
    make_durable_folder(Files(), run / "server")
    found = modes(tmp_path)
    store.close()
    folders = {name for name in found if (tmp_path / name).is_dir() or "tmp-" in name}
    assert "runs/one/clients/a/journal.acknowledged" in found
    assert {"runs", "runs/one", "runs/one/spool", "runs/one/clients/a"} <= folders
    for name, mode in found.items():
        is_file = "." in name.rpartition("/")[2]
        assert mode == (0o600 if is_file else 0o700), name


def test_a_directory_that_is_there_keeps_its_mode(tmp_path):
    """An operator may have opened it to a group."""
    (tmp_path / "run").mkdir(0o755)
    make_folder(tmp_path / "run")
    Store(tmp_path / "run").recover()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EEXIST, "a file has that name: choose another --run-dir"),
        (errno.EDQUOT, "make room in the quota"),
        (errno.EROFS, "choose another --run-dir"),
        (errno.EACCES, "check its permissions, or choose another --run-dir"),
        (errno.EPERM, "check its permissions, or choose another --run-dir"),
        (errno.ENOENT, "check the path"),
        (errno.ENOTDIR, "is no folder"),
        (errno.EIO, None),
    ],
)
def test_an_error_of_the_disk_says_what_fits(number, words):
    """To make room does not help where a path is wrong."""
    text = disk_words(OSError(number, os.strerror(number), "/r/ledger.jsonl"))
    system, _, advice = text.partition("; ")
    assert system == f"{os.strerror(number)} (/r/ledger.jsonl)"
    assert (words in advice) if words else not advice


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("/proc/fsl", "check the path, or choose another --run-dir"),
        ("/dev/null/x", "a part of the path is no folder"),
        ("/sys/fsl", "choose another --run-dir"),
    ],
)
def test_a_run_directory_that_cannot_be_made_is_one_line(where, words, capsys):
    """The remedy was once wrong: make room and try again."""
    assert cli.main(["--role", "ps", "--run-dir", where, "--insecure", "127.0.0.1:0"]) == 2
    shown = capsys.readouterr().err.splitlines()
    (line,) = [one for one in shown if one.startswith("error")]
    assert words in line
    assert where in line
    assert "make room" not in line


def test_a_new_file_replaces_none(tmp_path):
    """A key that another process has made meanwhile must stay, and no half of a file remains."""
    path = tmp_path / "file"
    replace_bytes(path, b"first", is_new=True)
    with pytest.raises(FileExistsError):
        replace_bytes(path, b"second", is_new=True)
    assert path.read_bytes() == b"first"
    replace_bytes(path, b"third")
    assert modes(tmp_path) == {"file": 0o600}
    assert path.read_bytes() == b"third"

"""A parameter server writes into a run directory, and into no other one."""

import json

import pytest

from fsl_async.config.load import load
from fsl_async.errors import RunDirError
from fsl_async.nodes.ps import node
from fsl_async.nodes.ps.directory import check_directory
from fsl_async.process.stopper import Stopper


def test_new_and_own_directories_are_taken(tmp_path):
    """One that is not there, an empty one, one with logs, and a run."""
    check_directory(tmp_path / "none")
    check_directory(tmp_path)
    for name in ("ps.log", "server.err", "slurm-17.out", "fsl.toml", ".keep", "members.json"):
        (tmp_path / name).write_text("")
    check_directory(tmp_path)
    (tmp_path / "journal.jsonl").write_text(json.dumps({"role": "ps"}) + "\n")
    (tmp_path / "notes.md").write_text("")
    check_directory(tmp_path)


@pytest.mark.parametrize("role", ["client", "relay", "server"])
def test_another_nodes_directory_is_refused(tmp_path, role):
    """Its journal would be continued as this one's."""
    (tmp_path / "journal.jsonl").write_text(json.dumps({"role": role}) + "\n")
    with pytest.raises(RunDirError, match=f"is the run directory of a {role}: give another"):
        check_directory(tmp_path)
    (tmp_path / "ledger.jsonl").write_text("")
    check_directory(tmp_path)


def test_a_folder_of_data_is_refused(tmp_path):
    """Checkpoints among texts would be trained on. Nothing is written there."""
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(RunDirError, match=r"holds book\.txt and no run"):
        node.serve(
            load(None, []), tmp_path, from_version=None, announce=print, log=print, stop=Stopper()
        )
    assert [one.name for one in tmp_path.iterdir()] == ["book.txt"]
    with pytest.raises(RunDirError, match=r"holds book\.txt and no run"):
        check_directory(tmp_path)

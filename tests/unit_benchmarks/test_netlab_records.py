"""Records of laboratories on disk: only a laboratory's name selects a folder to remove."""

import pytest
from netlab import __main__ as netlab
from netlab import host, laboratory, records


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Make a folder for laboratories, for a user who may make them, on a machine without any."""
    monkeypatch.setattr(records, "ROOT", tmp_path / "labs")
    for module in (host, netlab):
        monkeypatch.setattr(module, "require", lambda: None)
        monkeypatch.setattr(module, "namespaces", list)
    return tmp_path / "labs"


@pytest.mark.parametrize("name", ["{victim}", "../victim", "..", ".", "", "a/b", "A"])
def test_down_removes_no_folder_but_a_laboratorys(root, tmp_path, capsys, name):
    """It runs as root: a path such as `--name /home/me` is refused and its folder kept."""
    victim = tmp_path / "victim"
    for folder in (victim, root / "other", root / "a" / "b"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("precious")
    assert netlab.main(["down", "--name", name.replace("{victim}", str(victim))]) == 2
    assert "does not name a laboratory" in capsys.readouterr().err
    kept = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("file"))
    assert kept == ["labs/a/b/file", "labs/other/file", "victim/file"]
    assert not list(tmp_path.rglob("lock"))


def test_folders_of_others_are_no_laboratories(root):
    """Other folders with a file of the same name are left alone by `down --all` and by `up`."""
    for name in ("lab", "Not a lab"):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text("{}")
    assert records.names() == ["lab"]


def test_a_laboratory_that_is_not_there(root, capsys):
    """To take it down changes nothing and raises nothing."""
    assert netlab.main(["down", "--name", "lab"]) == 0
    assert "no laboratory lab" in capsys.readouterr().out
    assert not root.exists()
    assert laboratory.remove("lab") is False

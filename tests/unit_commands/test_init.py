"""`fsl-node init` writes a file that loads, and overwrites nothing."""

import json

from fsl_async import cli
from fsl_async.config.load import load
from fsl_async.config.settings import Config


def test_it_writes_a_commented_file_that_loads(tmp_path, monkeypatch, capsys):
    """The file is the documentation of all settings, so it must be complete and valid."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    assert capsys.readouterr().out == (
        "wrote fsl.toml; start with: fsl-node --role ps --config fsl.toml\n"
    )
    assert load("fsl.toml") == Config()
    assert (
        "# seconds from one sync to the next\nevery_s = 600.0"
        in (tmp_path / "fsl.toml").read_text()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["fsl.toml"]


def test_a_dash_is_standard_output(tmp_path, monkeypatch, capsys):
    """`init -` must print the settings and create no file called "-"."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "-"]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.toml").write_text(text)
    assert load(tmp_path / "a.toml") == Config()
    assert cli.main(["init", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "-", "text": text}


def test_it_overwrites_only_when_forced(tmp_path, capsys):
    """An edited configuration must survive a second `init`."""
    path = tmp_path / "a.toml"
    path.write_text("mine")
    assert cli.main(["init", str(path)]) == 2
    assert path.read_text() == "mine"
    assert capsys.readouterr().err == (
        f"error: {path} exists already; --force overwrites it, or give another path\n"
    )
    assert cli.main(["init", str(path), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(path)}
    assert load(path) == Config()
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_one_line(tmp_path, capsys):
    """An OSError must become one line with the user's path."""
    path = tmp_path / "no" / "a.toml"
    assert cli.main(["init", str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: No such file or directory\n"


def test_the_short_file_has_what_most_runs_change(tmp_path, monkeypatch, capsys):
    """It must fit on a screen, load, equal the defaults and explain each setting."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--short"]) == 0
    assert load("fsl.toml") == Config()
    lines = (tmp_path / "fsl.toml").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    settings = [line for line in lines if " = " in line and not line.startswith("#")]
    assert 10 <= len(settings) <= len(lines) <= 20
    assert all("  # " in line for line in settings)
    for line in ("every_s = 600.0", "clients = 3", 'preset = "3m"'):
        assert any(one.startswith(f"{line} ") for one in settings)
    (tmp_path / "fsl.toml").write_text("\n".join(lines).replace("600.0", "60.0"))
    assert load("fsl.toml").sync.every_s == 60.0

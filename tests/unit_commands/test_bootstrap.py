"""bin/bootstrap.sh installs what is missing, and nothing else. A Python takes notes instead."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# It stands for the Python of the system and for that of the environment.
PYTHON = f"""#!/bin/bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-c import sys;"*) ;;
    "-m pip --version") [ ! -e "$NOTES.no-pip" ] ;;
    "-m ensurepip"*)
        [ ! -e "$NOTES.fails" ] || exit 1
        rm "$NOTES.no-pip" && echo ensurepip >>"$NOTES"
        ;;
    "- "*) exec {sys.executable} "$@" ;;
    *"pip install"*)
        [ ! -e "$NOTES.fails" ] || exit 1
        case "$*" in
            *" -e "*) echo build >>"$NOTES" ;;
            *) echo "install $(tr '\\n' ' ' <"${{@: -1}}")" >>"$NOTES" ;;
        esac
        ;;
    *compileall*) echo compile >>"$NOTES" ;;
    *) echo "unexpected: $*" >>"$NOTES" ;;
esac
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone that has what bootstrap.sh reads; returns a function that runs it."""
    for name in ("bin/bootstrap.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "codecs/native", tmp_path / "codecs/native")
    python = tmp_path / "python-that-notes"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name in ("FSL_EXTRAS", "FSL_VENV", "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    notes = tmp_path / "notes"

    def bootstrap(*extras, code=0, **variables):
        """Run it; return the notes that it left, in order of kind, and what it printed."""
        notes.unlink(missing_ok=True)
        made = (tmp_path / ".venv/bin/python").exists()
        environment = os.environ | {"NOTES": str(notes)} | variables
        if not made:
            environment["PYTHON"] = str(python)
        command = f"set -euo pipefail; source bin/bootstrap.sh; fsl_bootstrap {' '.join(extras)}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        return sorted(notes.read_text().splitlines()) if notes.exists() else [], done.stderr

    return bootstrap


def packages(line):
    """Names in the note about an install."""
    kind, *names = line.split()
    assert kind == "install"
    return {name.partition(">")[0] for name in names}


def test_running_needs_no_packages_of_tests(clone):
    """The first use must not download mypy, pytest and transformers; the second does nothing."""
    (build, compiled, installed), text = clone()
    assert (build, compiled) == ("build", "compile")
    assert packages(installed) >= {"torch", "pyzmq"}
    assert not packages(installed) & {"pytest", "mypy", "ruff", "transformers", "matplotlib"}
    assert "first use" in text
    assert clone() == ([], "")


def test_testing_adds_its_packages_and_nothing_is_installed_twice(clone):
    """bin/test after bin/fsl-node must not build the codec again, nor bin/fsl-node after it."""
    clone()
    (compiled, installed), text = clone("dev")
    assert compiled == "compile"
    wanted = "torch pytest mypy transformers matplotlib opacus"
    assert packages(installed) >= {*wanted.split()}
    assert "with dev" in text
    assert clone() == clone("dev") == ([], "")


def test_extras_that_are_asked_for_are_kept(clone):
    """FSL_EXTRAS once, and a change of versions later must not forget what it installed."""
    clone()
    (_, installed), _ = clone(FSL_EXTRAS="gguf,plot")
    assert packages(installed) >= {"gguf", "transformers", "matplotlib"}
    assert clone(FSL_EXTRAS="plot") == clone() == ([], "")
    done, text = clone(FSL_EXTRAS="nonsense", code=2)
    assert done == []
    assert text.startswith("FSL_EXTRAS: no extra 'nonsense'; there are ")


def test_what_has_changed_is_done_again(clone, tmp_path):
    """Pinned versions do not touch the codec, and its sources do not touch the packages."""
    clone(FSL_EXTRAS="plot")
    with (tmp_path / "constraints.txt").open("a") as file:
        file.write("# one more line\n")
    (compiled, installed), _ = clone()
    assert (compiled, "matplotlib" in packages(installed)) == ("compile", True)
    with (tmp_path / "codecs/native/src/bindings.cpp").open("a") as file:
        file.write("// one more line\n")
    assert clone()[0] == ["build"]
    assert clone() == ([], "")


def test_a_failure_is_tried_again(clone, tmp_path):
    """Pip without network: exit code 2, and the next call does all of it."""
    (tmp_path / "notes.fails").touch()
    assert clone(code=2)[0] == []
    (tmp_path / "notes.fails").unlink()
    assert [note.split()[0] for note in clone()[0]] == ["build", "compile", "install"]


def test_an_environment_without_pip_gets_it(clone, tmp_path):
    """As Ctrl-C leaves it; the folder is kept, since it may hold packages of the user."""
    for mark in (".no-pip", ".fails"):
        (tmp_path / f"notes{mark}").touch()
    notes, text = clone(code=2)
    assert notes == []
    assert ".venv has no pip; remove that folder and start again" in text
    (tmp_path / "notes.fails").unlink()
    assert [note.split()[0] for note in clone()[0]] == ["build", "compile", "ensurepip", "install"]
    assert clone() == ([], "")


def test_tab_installs_nothing(clone):
    """Completion of bin/fsl-node in a fresh clone must not begin to install."""
    assert clone(_FSL_NODE_COMPLETE="bash_complete") == ([], "")

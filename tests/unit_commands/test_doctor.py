"""`fsl-node doctor` on machines with and without problems."""

import json
import os
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

import fsl_codecs.dispatch
from fsl_async import cli
from fsl_async.commands import doctor
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder

NAMES = [
    "versions", "extras", "codec", "torch", "event loop", "network", "TCP", "keys", "open files",
    "disk",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("FSL_KEYS", str(tmp_path / "keys"))


def by_name(tmp_path):
    return {finding.name: finding for finding in doctor.examine(tmp_path)}


def test_this_machine_is_fit(tmp_path, capsys):
    """A node must run where its tests run, and every check must print one line."""
    assert cli.main(["doctor", "--run-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES)
    assert all(name in line for name, line in zip(NAMES, lines, strict=True))


def test_json(tmp_path, capsys):
    """Scripts must get the same findings, with numbers."""
    assert cli.main(["doctor", "--json", "--run-dir", str(tmp_path / "not" / "there")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["ok"] is True
    assert [finding["name"] for finding in result["findings"]] == NAMES
    details = {finding["name"]: finding["details"] for finding in result["findings"]}
    assert details["codec"]["implementation"] in details["codec"]["available"]
    assert details["disk"]["free_bytes"] > 0
    assert details["disk"]["path"] == str(tmp_path)


def test_a_missing_build_is_reported_with_its_remedy(tmp_path, monkeypatch):
    """Without the extension everything works, but slowly, so the user needs the remedy."""
    monkeypatch.setattr(fsl_codecs.dispatch, "_module", None)
    monkeypatch.setattr(fsl_codecs.dispatch, "_missing", "not built: install a compiler")
    monkeypatch.setattr(fsl_codecs.dispatch, "_choice", fsl_codecs.dispatch.choose("auto"))
    finding = by_name(tmp_path)["codec"]
    assert finding.status == doctor.WARNING
    assert finding.text.startswith("numpy: not built: install a compiler.")


def test_missing_extras_are_named_with_the_line_that_installs_them(tmp_path, monkeypatch):
    """A new user must see what `demo lora` or --png will ask for; nothing is wrong without them."""
    monkeypatch.setattr(doctor, "_version_of", {"aiohttp": "1", "opacus": "2"}.get)
    finding = by_name(tmp_path)["extras"]
    assert finding.status == doctor.OK
    here, _, missing = finding.text.partition("; not installed: ")
    assert here == "web, dp"
    assert missing.startswith("prometheus, tensorboard, wandb, mlflow, hf, datasets, gguf, ")
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(doctor._EXTRAS) <= set(pyproject["project"]["optional-dependencies"])


def test_a_slower_choice_is_a_warning(tmp_path, monkeypatch):
    """A variable that was set for a test and forgotten costs speed, so it must be reported."""
    monkeypatch.setattr(fsl_codecs.dispatch, "available", lambda: ("faster", "numpy"))
    monkeypatch.setattr(fsl_codecs.dispatch, "_choice", fsl_codecs.dispatch.choose("numpy"))
    finding = by_name(tmp_path)["codec"]
    assert finding.status == doctor.WARNING
    assert finding.text == "numpy: FSL_CODECS_PATH=numpy; faster would be faster"


def test_lacking_features_are_named(tmp_path, monkeypatch):
    """A user of an older machine must see why the fastest path is missing."""
    monkeypatch.setattr(fsl_codecs.dispatch, "available", lambda: ("numpy", "scalar"))
    monkeypatch.setattr(fsl_codecs.dispatch, "_choice", fsl_codecs.dispatch.choose("numpy"))
    monkeypatch.setattr(doctor, "_lacking_features", lambda: {"avx2": ["bmi2"], "avx512": []})
    finding = by_name(tmp_path)["codec"]
    assert "bmi2" not in finding.text  # NumPy: the build is missing, not a CPU feature
    monkeypatch.setattr(fsl_codecs.dispatch, "available", lambda: ("scalar", "numpy"))
    better = fsl_codecs.dispatch.Choice(type("Scalar", (), {"name": "scalar"})(), "the best")
    monkeypatch.setattr(fsl_codecs.dispatch, "_choice", better)
    finding = by_name(tmp_path)["codec"]
    assert finding.status == doctor.OK
    assert finding.text == "scalar: the best; avx2 would need bmi2"


def test_problems_end_with_exit_code_1(tmp_path, monkeypatch, capsys):
    """A script may check the exit code before it starts a node."""
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 1 << 20)  # noqa: PYI024
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert cli.main(["doctor", "--run-dir", str(tmp_path)]) == 1
    assert "problem  disk        1.0 MB free" in capsys.readouterr().out


def test_little_disk_and_few_files_are_warnings(tmp_path, monkeypatch):
    """Little disk and few files are enough for some uses, so they must not be problems."""
    resource = pytest.importorskip("resource")
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 5 << 30)  # noqa: PYI024
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    limits = [128, 256]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    findings = by_name(tmp_path)
    assert findings["disk"].status == doctor.WARNING
    files = findings["open files"]
    assert files.status == doctor.WARNING
    assert "256 allowed (128 until raised): room for " in files.text
    assert (files.details["soft"], files.details["hard"]) == (128, 256)
    assert 60 <= files.details["clients_fit"] <= 96
    assert files.details["relay_connections"] == 64
    limits[:] = 256, 4096
    assert by_name(tmp_path)["open files"].status == doctor.OK
    limits[:] = 70, 70
    text = by_name(tmp_path)["open files"].text
    assert "room for 0 clients" in text
    assert "ulimit -n" in text
    assert "too few for a relay" in text


def test_a_broken_package_is_a_finding(tmp_path, monkeypatch):
    """The doctor is used on broken installs, so an import error must be a finding."""

    def broken(name):
        raise ImportError(f"no {name} today")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    monkeypatch.setattr(doctor, "version", lambda _: "1.0")
    findings = by_name(tmp_path)
    assert findings["torch"].status == doctor.PROBLEM
    assert findings["torch"].text == "ImportError: no torch today"
    assert findings["versions"].status == doctor.OK


def test_a_wrong_variable_is_one_line(tmp_path):
    """A typing error in FSL_CODECS_PATH must be one line in every command."""
    done = subprocess.run(
        [sys.executable, "-m", "fsl_async.cli", "doctor"],
        env={**os.environ, "FSL_CODECS_PATH": "avx1024"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    text = "FSL_CODECS_PATH=avx1024: no codec implementation 'avx1024'"
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_keys_are_shown_and_an_open_secret_is_a_problem(tmp_path):
    """The finding must show the key, and the remedy for a secret that others can read."""
    finding = by_name(tmp_path)["keys"]
    assert finding.status == doctor.OK
    assert "keys new" in finding.text
    folder = KeysFolder(tmp_path / "keys")
    public = folder.make_pair().public
    folder.change_allowed(lambda before: before.with_entry(Entry(public, "me")))
    finding = by_name(tmp_path)["keys"]
    assert (finding.status, finding.details["trusted"]) == (doctor.OK, 1)
    assert public in finding.text
    assert folder.pair().secret not in str(finding)
    folder.secret_path.chmod(0o644)
    finding = by_name(tmp_path)["keys"]
    assert finding.status == doctor.PROBLEM
    assert "chmod 600" in finding.text


@pytest.mark.parametrize(
    ("setting", "text"),
    [("1\n", "slow_start_after_idle=0"), ("0\n", "keep"), (None, "no settings")],
)
def test_slow_start_after_idle_is_a_hint(tmp_path, monkeypatch, setting, text):
    """Only root can change it and most runs need not, so it must not be a warning."""
    file = tmp_path / "tcp_slow_start_after_idle"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(doctor, "_SLOW_START", file)
    finding = by_name(tmp_path)["TCP"]
    assert finding.status == doctor.OK
    assert text in finding.text

"""Results that must stay equal while the code behind it is rebuilt; see `make.py`."""

import json

import driver
import make
import pytest
from kinds import BLOCK, CHUNK, KINDS, LAST

from fsl_async.config import settings
from fsl_async.store.model import manifest as manifest_module

RUNS = json.loads(make.RUNS_JSON.read_text())
SIM = json.loads(make.SIM_JSON.read_text())


@pytest.fixture
def _small_chunks(monkeypatch):
    """Several chunks in each small model."""
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", CHUNK)
    monkeypatch.setattr(settings, "BLOCK_VALUES", BLOCK)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("left", ["run", "killed"])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_directory_goes_on(tmp_path, name, left):
    """It was left by an older process, in order or by a kill: the next versions are those that the
    same deltas gave then, with the same momentum and residual after them.
    """
    make.unpack(name, tmp_path)
    assert make.go_on(KINDS[name], tmp_path / left) == RUNS[name][left]


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("name", KINDS)
def test_a_new_run_reaches_the_same_versions(tmp_path, name):
    """The directories are of a run that this code would make, too."""
    server, _, digests = driver.play(tmp_path / "run", KINDS[name], LAST)
    assert digests.items() >= RUNS[name]["run"]["versions"].items()
    assert driver.ended(server, tmp_path / "run") == RUNS[name]["run"]["vectors"]


@pytest.mark.parametrize("left", ["run", "killed"])
def test_a_split_server_goes_on(tmp_path, left):
    """It finds the newest checkpoint that is whole, and what was trained after it; and goes on."""
    make.unpack("split_server", tmp_path)
    assert make.go_on_split(tmp_path / left) == RUNS["split_server"][left]


@pytest.mark.parametrize("arguments", SIM)
def test_a_simulated_run_is_the_same(arguments):
    """The counts hold whatever events are called; the hash holds until they are renamed."""
    trace, counts = driver.simulate(arguments)
    assert counts == SIM[arguments]["counts"]
    assert counts["invariant_violations"] == 0
    assert trace == SIM[arguments]["trace"]

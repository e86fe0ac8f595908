"""Groups on real processes: `demo groups`, in which two parameter servers are killed."""

import json
import subprocess
import sys

import pytest


@pytest.mark.sweep
def test_groups_survive_the_death_of_any_parameter_server(tmp_path):
    """Two are killed in a reduction: one lineage, equal weights, nothing lost or doubled."""
    argv = [sys.executable, "-P", "-m", "fsl_async.cli", "demo", "groups", "--seconds", "30"]
    argv += ["--run-dir", str(tmp_path / "run"), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["digests_equal"]
    assert found["kills"] == 2
    assert found["rounds"] >= 2
    assert found["attempts"] > found["rounds"]
    assert found["global_updates"] > 0
    assert 0 < found["global_update_bytes"] < found["full_bytes"] / 3
    assert (found["deltas_lost"], found["deltas_doubled"]) == (0, 0)

"""Default names: the same after relaunches, different between the clients of a host."""

import signal
import subprocess
import sys

import pytest

from fsl_async.cluster import name_slot
from fsl_async.cluster.name_slot import check_name, claim_name
from fsl_async.errors import FslError, UsageError

HOLD = """
import sys, time, pathlib
from fsl_async.cluster.name_slot import claim_name
slot = claim_name(sys.argv[1], directory=pathlib.Path(sys.argv[2]), host="gpu box")
print(slot.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path):
    processes = []

    def start(server="tcp://a:1"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, server, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_client_comes_back_under_its_name(hold):
    """The run has a shard for each name: a relaunch after kill -9 must get the same one."""
    first, name = hold()
    assert name == "gpu-box"
    assert hold()[1] == "gpu-box-2"
    assert hold("tcp://other:1")[1] == "gpu-box"  # another run, its own names
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert hold()[1] == "gpu-box"
    assert hold()[1] == "gpu-box-3"


def test_two_clients_of_one_process_have_two_names(tmp_path, hold):
    """A record lock does not exclude its own process: the second client of a notebook once replaced
    the first.
    """
    one, two = (claim_name("tcp://a:1", directory=tmp_path, host="gpu box") for _ in range(2))
    assert (one.name, two.name) == ("gpu-box", "gpu-box-2")
    two.close()
    two.close()
    assert hold()[1] == "gpu-box-2"  # and the first one's lock stands
    one.close()
    again = claim_name("tcp://a:1", directory=tmp_path, host="gpu box")
    assert again.name == "gpu-box"
    again.close()


def test_a_directory_that_cannot_be_used_asks_for_a_name(tmp_path):
    """A read-only home must not stop a client that has --name."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FslError, match=r"cannot keep a lock file in .*; give this client a --name"):
        claim_name("tcp://a:1", directory=blocked / "names", host="h")


def test_state_is_kept_where_the_xdg_rules_say(monkeypatch, tmp_path):
    """By that specification a relative XDG_STATE_HOME is ignored."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert name_slot.default_directory() == tmp_path / "fsl-async" / "names"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert name_slot.default_directory() == tmp_path / ".local" / "state" / "fsl-async" / "names"


@pytest.mark.parametrize("host", ["", "***", "a" * 200, "ünïcode.example"])
def test_any_host_name_gives_a_valid_client_name(tmp_path, host):
    """Names become file names and routing ids."""
    slot = claim_name("tcp://a:1", directory=tmp_path, host=host)
    assert check_name(slot.name + "-256")[:-4] == slot.name
    slot.close()
    slot.close()


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "a\n", ".", ".."])
def test_bad_names_are_refused(name):
    """The transport accepts only these names."""
    with pytest.raises(UsageError, match="must be 1 to 64"):
        check_name(name)

"""A client that dies is launched again by the parameter server, as processes."""

import json
import signal
import sys
import time

import pytest

pytestmark = pytest.mark.slow


def test_the_server_launches_a_client_that_was_killed(site):
    """Killed with -9; its session expires; the launcher of its name is asked once; its second life takes part and ends with the run."""
    task = f"{site.folder / 'task.py'}:train"
    words = [sys.executable, "-m", "fsl_async.cli", "--role", "client", "--name", "{name}"]
    command = json.dumps([*words, "--task", task, "{address}"])
    launchers = site.folder / "launchers.toml"
    launchers.write_text(
        f'first_wait_s = 0.2\n[[launcher]]\nclients = "b*"\nkind = "local"\ncommand = {command}\n'
    )
    server = site.server("--launchers", launchers, session__expire_after_s=2)
    keeper = site.client("a")
    victim = site.client("b")
    site.wait_version(1)
    killed_at = time.time_ns()
    victim.kill()
    server.wait_for("b is launched again in 0.2 s")
    server.wait_for("launched b again by local")
    server.wait_for("b is back")

    def of_its_second_life():
        keys = [one["key"].split("/") for one in site.ledger("accepted")]
        return any(key[0] == "b" and int(key[1]) > killed_at for key in keys)

    # Incarnations are nanoseconds since 1970. The first life may have been too short for a delta of its own.
    site.wait_until(of_its_second_life, "a delta of b's second life")
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert keeper.end() == 0
    lines = (site.run_dir / "journal.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in lines if '"Relaunch"' in line]
    told = [note["what"] for note in notes if note["client"] == "b"]
    assert told[:2] == ["waiting", "launched"]
    assert "joined run" in (site.run_dir / "launched.log").read_text()


def test_a_wrong_launch_file_is_told_before_the_run_begins(site):
    """Not at the first death, hours later."""
    path = site.folder / "launchers.toml"
    path.write_text('[[launcher]]\nclients = "*"\nkind = "cloud"\ncommand = ["x"]\n')
    server = site.start("--role", "ps", "--launchers", path, "127.0.0.1:0")
    assert server.end() == 2
    assert "launcher 1: kind must be one of local, slurm, command" in server.text

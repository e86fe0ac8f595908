"""A client that dies is launched again by the parameter server, as processes."""

import contextlib
import json
import os
import signal
import sys
import time

import pytest

from fsl_async.cluster.relauncher import MembersFile

pytestmark = pytest.mark.slow


def has_delta_after(site, ended_at):
    """Return whether the ledger has a delta of an incarnation of b that began after `ended_at`, ns
    since 1970.
    """
    keys = [one["key"].split("/") for one in site.ledger("accepted")]
    return any(key[0] == "b" and int(key[1]) > ended_at for key in keys)


def test_the_server_launches_a_client_that_was_killed(site):
    """After kill -9 its session expires and its launcher runs once; the new process takes part to
    the end.
    """
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
    # The first process may have ended before its first delta.
    site.wait_until(lambda: has_delta_after(site, killed_at), "a delta of b's second process")
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert keeper.end() == 0
    lines = (site.run_dir / "journal.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in lines if '"relaunch"' in line]
    events = [note["what"] for note in notes if note["client"] == "b"]
    assert events[:2] == ["waiting", "launched"]
    assert "joined run" in (site.run_dir / "launched.log").read_text()


HANGS_ONCE = """
import pathlib, time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    hung, steps, goes_on = pathlib.Path(__file__).with_name("hung"), 0, True
    while goes_on:
        if steps == 30 and not hung.exists():
            hung.touch()
            time.sleep(120.0)
        time.sleep(0.02)
        steps += 1
        goes_on = fed.step(tokens=8)
"""
LAUNCH = """#!/bin/sh
{command} >>{folder}/second.log 2>&1 </dev/null &
echo $! >>{folder}/launched
"""


@pytest.mark.parametrize("reason", ["training hangs", "SIGTERM"])
def test_a_client_that_ends_to_be_launched_again_is(site, reason):
    """It sends goodbye and exits 64: the goodbye says that it is to be launched again."""
    path = site.folder / "hangs.py"
    path.write_text(HANGS_ONCE)
    if reason == "SIGTERM":
        (site.folder / "hung").touch()
    words = (sys.executable, "-m", "fsl_async.cli", "--role", "client", "--name", '"$1"', "--task")
    command = " ".join([*words, f"{path}:train", '"$2"'])
    script = site.folder / "launch"
    script.write_text(LAUNCH.format(command=command, folder=site.folder))
    script.chmod(0o755)
    launchers = site.folder / "launchers.toml"
    launchers.write_text(
        'first_wait_s = 0.2\n[[launcher]]\nclients = "b"\nkind = "command"\n'
        f'command = ["{script}", "{{name}}", "{{address}}"]\n'
    )
    server = site.server(
        "--launchers", launchers, train__hang_least_s=1.5, train__hang_restart="true"
    )
    keeper = site.client("a")
    task = ("--task", f"{path}:train", "--grace", "4")
    victim = site.start("--role", "client", "--name", "b", *task, site.address)
    try:
        if reason == "SIGTERM":
            site.wait_version(1)
            victim.signal(signal.SIGTERM)
        assert victim.end(40) == 64
        ended_at = time.time_ns()
        line = server.wait_for("b is launched again in ")
        assert f"unless it comes back by itself ({reason}" in line
        assert 0.2 < float(line.split(" again in ")[1].split()[0]) <= 4.2, (
            "the rest of the grace, and the wait"
        )
        server.wait_for("launched b again by command")
        server.wait_for("b is back")
        site.wait_until(lambda: has_delta_after(site, ended_at), "a delta of b's second process")
        server.signal(signal.SIGINT)
        assert server.end() == 130
        assert keeper.end() == 0
    finally:
        file = site.folder / "launched"
        launched = file.read_text().split() if file.exists() else []
        for pid in launched:  # if it has not ended with the run
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert len(launched) == 1


def members_in(site):
    """Return the names in the server's list of members."""
    return sorted(MembersFile(site.run_dir / "members.json").read())


UNRESPONSIVE = """
import signal
import time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("unresponsive", flush=True)
    time.sleep(600)
"""
"""As in a call that lasts minutes: another thread takes the signal, and Python's handlers wait for
the main thread.
"""


def test_a_client_that_is_interrupted_twice_stays_away(site):
    """Its training handles no signal, so the first Ctrl-C does not end it. The second does, with a
    goodbye: it is not launched again, and no member of the run any more.
    """
    launchers = site.folder / "launchers.toml"
    launchers.write_text('[[launcher]]\nclients = "b"\nkind = "command"\ncommand = ["true"]\n')
    (site.folder / "unresponsive.py").write_text(UNRESPONSIVE)
    server = site.server("--launchers", launchers, session__expire_after_s=2)
    task = f"{site.folder / 'unresponsive.py'}:train"
    keeper, victim = [
        site.start("--role", "client", "--name", name, "--task", task, site.address)
        for name in "ab"
    ]
    for client in (keeper, victim):
        client.wait_for("unresponsive")
    site.wait_until(lambda: members_in(site) == ["a", "b"], "both are members")
    victim.signal(signal.SIGINT)
    time.sleep(1.0)
    assert members_in(site) == ["a", "b"]  # its training was asked to end, and does not respond
    victim.signal(signal.SIGINT)
    assert victim.end() == 130
    site.wait_until(lambda: members_in(site) == ["a"], "b is no member any more")
    time.sleep(3.0)  # as long as an expiry would take
    keeper.kill()
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert '"relaunch"' not in (site.run_dir / "journal.jsonl").read_text()

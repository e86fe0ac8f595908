"""benchmarks/transport.py: its counts, its rows in a tiny run, its errors; no speeds."""

import json
import os
import socket

import pytest

from fsl_async import cli


def test_a_tiny_run_has_its_rows(capsys, tmp_path):
    """Processes start, move chunks and report; rows are printed and kept."""
    kept = tmp_path / "rows.jsonl"
    words = ["--chunks", "64", "--rounds", "1", "--seconds", "0.2", "--warm", "0.05"]
    words += ["--others", "tcp,pyzmq", "--json", "--save", str(kept)]
    assert cli.main(["bench", "transport", *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["machine", "way", "way", "way"]
    assert [row.get("way") for row in rows[1:]] == ["fsl", "tcp", "pyzmq"]
    assert rows[1]["gb_s"] > 0
    assert rows[1]["over_tcp"] > 0
    assert rows[1]["over_pyzmq"] > 0
    assert rows[1]["control_worst_s"] >= 0
    assert rows == [json.loads(line) for line in kept.read_text().splitlines()]


def test_a_transfer_to_another_machine(capsys, tmp_path, monkeypatch):
    """The listener is started by ssh as one line of shell, and the dialer connects to its port.

    The listener has ended when the next one takes the port, although only ssh is killed.
    """
    ssh, calls = tmp_path / "ssh", tmp_path / "calls"
    ssh.write_text(f'#!/bin/sh\necho "$1 $2 $3 $4" >>{calls}\nsh -c "$5"\nexit $?\n')
    ssh.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        to = f"me@127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--chunks", "64", "--rounds", "1", "--seconds", "0.2", "--warm", "0.05"]
    assert cli.main(["bench", "transport", "--to", to, *words, "--down", "--json"]) == 0
    machine, ours, tcp = map(json.loads, capsys.readouterr().out.splitlines())
    assert machine["net"] == ours["net"] == to
    assert ours["over_tcp"] > 0
    assert "control_worst_s" not in ours  # the clocks of two machines differ
    assert tcp["mbit_s"] > 0
    assert calls.read_text() == "-o BatchMode=yes -- me@127.0.0.1\n" * 2


@pytest.mark.parametrize("to", ["-oProxyCommand=x", "a:b", "me@a:70000", ":1"])
def test_a_wrong_machine_is_refused(to, capsys):
    """A destination that begins with a hyphen would be an option of ssh."""
    assert cli.main(["bench", "transport", f"--to={to}"]) == 2
    assert "write [USER@]HOST" in capsys.readouterr().err

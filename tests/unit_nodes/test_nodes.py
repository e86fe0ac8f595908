"""Arguments that the role commands pass to the runtime, and their output; the runtime is a stub."""

import json
import os
import shlex
import signal
import sys
import types
from pathlib import Path

import attrs
import pytest

from fsl_async import cli
from fsl_async.config import address as addresses
from fsl_async.config.settings import Config
from fsl_async.keys.folder import KeysFolder


@attrs.frozen
class Summary:
    """Stands for the runtime's result."""

    rounds: int = 3
    loss_last: float = 2.5


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.delenv("FSL_NODE_CALLED_AS", raising=False)

    def serve(config, run_dir, *, from_version, announce, log, stop, record, launching, keys):
        made.append((config, run_dir, from_version, stop, keys))
        announce("tcp://127.0.0.1:4567")
        return Summary()

    def join_run(options, *, stop, log):
        made.append(options)
        log("step 1")
        return Summary()

    ps, client = types.ModuleType("node_ps"), types.ModuleType("joining")
    ps.serve, client.join_run = serve, join_run
    monkeypatch.setitem(sys.modules, "fsl_async.nodes.ps.node", ps)
    monkeypatch.setitem(sys.modules, "fsl_async.nodes.client.joining", client)
    return made


def test_the_parameter_server_prints_the_line_to_paste(calls, capsys, tmp_path):
    """One copied line starts a client."""
    code = cli.main(["--role", "ps", "--run-dir", str(tmp_path), "--from-version", "4"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "    fsl-node --role client --name SITE --data PATH fsl://127.0.0.1:4567\n" in out
    assert out.endswith("rounds     3\nloss last  2.5\n")
    config, run_dir, from_version, stop, keys = calls[0]
    assert keys is None
    assert isinstance(config, Config)
    assert (run_dir, from_version, stop.requested) == (Path(tmp_path), 4, False)


def test_the_line_to_paste_begins_with_the_called_program(calls, capsys, monkeypatch):
    """A clone has bin/fsl-node, and nothing on the PATH; a run with a task needs --task."""
    monkeypatch.setenv("FSL_NODE_CALLED_AS", "my clone/bin/fsl-node")
    cli.main(["--role", "ps", "--set", "train.task='own.py:train'"])
    line = (
        "'my clone/bin/fsl-node' --role client --name SITE"
        " --task FILE.py:FUNCTION fsl://127.0.0.1:4567\n"
    )
    assert f"    {line}" in capsys.readouterr().out


def test_with_json_the_parameter_server_prints_objects_only(calls, capsys):
    """A launcher reads the address from the first line and the result from the last."""
    cli.main(["--role", "ps", "--json"])
    out, err = capsys.readouterr()
    first, last = (json.loads(line) for line in out.splitlines())
    assert first["event"] == "listening"
    line = "fsl-node --role client --name SITE --data PATH fsl://127.0.0.1:4567"
    assert first["join"] == line  # the same as the line for people
    assert last == {"rounds": 3, "loss_last": 2.5}
    assert "listening at" in err  # for people


def test_the_client_gets_absolute_paths(calls, capsys, tmp_path, monkeypatch):
    """A relaunch from another folder must find the same task and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def train(fed): ...\n")
    args = ["--role", "client", "localhost:7100", "--name", "a.b-1", "--task", "train.py:train"]
    assert cli.main([*args, "--data", ".", "--threads", "2"]) == 0
    found = calls[0]
    assert (found.server, found.name) == ("tcp://localhost:7100", "a.b-1")
    assert (found.run_dir, found.threads) == (None, 2)
    assert (found.task, found.data) == (f"{tmp_path}/train.py:train", str(tmp_path))
    assert "step 1" in capsys.readouterr().out


def test_an_unencrypted_connection_needs_insecure(calls, capsys):
    """Weights leave a machine unencrypted only with --insecure."""
    assert cli.main(["--role", "client", "ps.example.org:7100", "--name", "a"]) == 2
    assert "has no key" in capsys.readouterr().err
    assert cli.main(["--role", "client", "ps.example.org:7100", "--name", "a", "--insecure"]) == 0
    assert cli.main(["--role", "client", "127.0.0.1:7100", "--name", "a"]) == 0
    assert capsys.readouterr().err == ""
    assert [call.keys for call in calls] == [None, None]


def test_keys_get_to_the_client_by_the_pasted_line(calls, capsys, tmp_path, monkeypatch):
    """The printed line works in a shell with any characters of a key."""
    for side in ("server", "client"):
        KeysFolder(tmp_path / side).make_pair()
    monkeypatch.setenv("FSL_KEYS", str(tmp_path / "server"))
    cli.main(["--role", "ps", "0.0.0.0:4567"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "--role client" in line)
    assert calls[0][-1].path == tmp_path / "server"
    monkeypatch.setenv("FSL_KEYS", str(tmp_path / "client"))
    words = [word for word in shlex.split(line)[1:] if word not in {"--data", "PATH"}]
    assert cli.main(words) == 0
    server = addresses.parse(calls[1].server)
    assert server.key == KeysFolder(tmp_path / "server").pair().public
    assert calls[1].keys.path == tmp_path / "client"
    cli.main(["--role", "ps", "--keys", str(tmp_path / "server"), "127.0.0.1:4567"])
    assert "?key=" in capsys.readouterr().out  # on loopback only with --keys
    cli.main(["--role", "ps", "127.0.0.1:4567"])
    assert "?key=" not in capsys.readouterr().out
    cli.main(["--role", "ps", "0.0.0.0:4567", "--insecure"])
    assert "?key=" not in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 64)])
def test_signals_drain_and_decide_the_exit_code(calls, capfd, monkeypatch, number, code):
    """A drained node prints its summary; its exit code asks for a relaunch or not."""
    asked = []

    def serve(config, run_dir, *, from_version, announce, log, stop, record, launching, keys):
        stop.subscribe(asked.append)
        os.kill(os.getpid(), number)
        return Summary()

    monkeypatch.setattr(sys.modules["fsl_async.nodes.ps.node"], "serve", serve)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert cli.main(["--role", "ps"]) == code
        last = signal.getsignal(number)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert asked == [False]
    out, err = capfd.readouterr()
    assert "rounds" in out
    assert "once more stops at once" in err
    assert last is not before[number], "a copy of the signal must not change the exit code"

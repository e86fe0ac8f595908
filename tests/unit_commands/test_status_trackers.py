"""`fsl-node status` with trackers and metrics: what it needs, waits for, and when it ends."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from tracked_run import TrackedRun

from fsl_async import cli
from fsl_async.commands import status
from fsl_async.commands.status import PORT, StatusOptions, watching
from fsl_async.errors import UsageError, to_install
from fsl_async.observe.clients import NodeState
from fsl_async.observe.node_folders import SILENT_S, is_gone
from fsl_async.tools.trackers import prometheus
from fsl_async.tools.trackers.outbox import RETRY_S

MAIN = "import sys; from fsl_async.cli import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("--tensorboard", "d"), "tensorboard"),
        (("--wandb",), "wandb"),
        (("--wandb", "p"), "wandb"),
        (("--mlflow", "http://h"), "mlflow"),
        (("--metrics",), "prometheus"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_waited_for(
    tmp_path, capsys, monkeypatch, words, extra
):
    """With the line that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["status", str(tmp_path / "none"), *words]) == 2
    assert to_install(extra) in capsys.readouterr().err


def test_a_folder_of_other_runs_is_not_waited_for(tmp_path, capsys, monkeypatch):
    """The line names them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    run = TrackedRun(tmp_path / "one")
    (tmp_path / "one" / "ledger.jsonl").touch()
    run.flush()
    assert cli.main(["status", str(tmp_path), "--metrics"]) == 2
    assert "give one of one" in capsys.readouterr().err
    run.writer.close()


def test_a_port_that_is_taken(tmp_path, capsys):
    """Two readers on one machine."""
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    run = TrackedRun(tmp_path)
    run.join("a")
    run.end()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["status", str(tmp_path), "--metrics", str(port)]) == 2
    assert f"--metrics {port}: Address already in use" in capsys.readouterr().err
    assert prometheus.PORT == PORT
    run.writer.close()


def test_metrics_of_a_server_that_starts_later(tmp_path):
    """A reader waits for the journal, serves what is new, and ends with the run."""
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    folder = tmp_path / "run"
    words = [sys.executable, "-c", MAIN, "status", str(folder), "--metrics", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert b"waits for" in reader.stderr.readline()
        run = TrackedRun(folder)
        run.join("a", "b")
        run.flush()
        url = json.loads(reader.stdout.readline())["url"]
        run.round("a", "b")
        run.flush()
        for _ in range(100):
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            if 'fsl_version{role="ps"} 1.0' in text:
                break
            time.sleep(0.1)
        assert 'fsl_client_loss{client="b",role="ps"} 4.0' in text
        run.end()
        out, _ = reader.communicate(timeout=30)
        assert reader.returncode == 0
        assert json.loads(out.splitlines()[-1])["version"] == 1
    run.writer.close()


def test_when_a_node_is_gone():
    """Ended, or killed on this machine and not started again for a while."""
    now = 1000.0
    dead = 2**22 + 1  # above the largest number of a process
    node = NodeState(host=socket.gethostname(), pid=os.getpid(), last_t=now)
    assert not is_gone(node, now + 10 * SILENT_S)
    node.pid = dead
    assert not is_gone(node, now + SILENT_S / 2)
    assert is_gone(node, now + 2 * SILENT_S)
    node.host = "another machine"
    assert not is_gone(node, now + 2 * SILENT_S)
    node.ended_at = now
    assert is_gone(node, now)


class Lines:
    """Keeps what is printed."""

    def __init__(self):
        self.said, self.warned = [], []

    def say(self, line):
        """See Output."""
        self.said.append(line)

    def warn(self, line):
        """See Output."""
        self.warned.append(line)


@pytest.mark.parametrize(
    ("uri", "left"),
    [
        ("http://me:secret@h:1/x", "http://h:1/x"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
        ("http://h/x", "http://h/x"),
    ],
)
def test_a_tracker_that_cannot_be_opened(tmp_path, uri, left):
    """One line, and no password in it."""

    def fail():
        raise OSError(f"no answer from\n{uri}")

    with pytest.raises(UsageError) as error:
        status._opened(f"--mlflow {uri}", fail, uri)
    assert error.value.message == (
        f"--mlflow {left} cannot be opened: OSError: no answer from; {left}"
    )


def test_a_tracker_that_fails_costs_a_line(tmp_path, monkeypatch):
    """The reader goes on; each tracker gets every point."""
    logged = []

    class Broken:
        name, where, fails = "Broken", "there", True

        def written(self):
            return {}

        def log(self, point):
            if self.fails:
                raise ConnectionError("away")
            logged.append(point.step)

        def close(self):
            logged.append("closed")

    broken = Broken()
    monkeypatch.setattr(status, "_trackers", lambda asked, run: iter([broken]))
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    run = TrackedRun(tmp_path)
    run.join("a")
    run.flush()
    from fsl_async.commands.status_report import NodeStatus

    output = Lines()
    asked = StatusOptions(tensorboard=None, wandb=None, mlflow="x", metrics=None)
    with watching([NodeStatus(tmp_path)], asked, output) as poll:
        assert output.said == ["Broken: there"]
        run.round("a")
        run.flush()
        poll()
        broken.fails = False
        poll()
        assert (logged, len(output.warned)) == ([], 1)
        clock[0] += RETRY_S
        poll()
        assert logged == [0, 1]
    assert logged == [0, 1, "closed"]
    run.writer.close()

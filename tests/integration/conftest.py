"""Real nodes for the tests of this folder: processes, sockets, disk."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from warm import WarmStarter

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
"""Factor on time limits: a wait ends as soon as its condition holds, but a busy machine is slow."""

TASK = '''
"""A network of three weights: joins fast, trains fast."""
import math, os, time
import torch

def train(fed, width=3, poison=0, step_s=0.02, sends=0):
    model = torch.nn.Linear(1, width)
    fed.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    while True:
        loss = ((model(torch.ones(1, 1)) - 2.0) ** 2).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        steps += 1
        if poison <= steps < 4 * poison:
            with torch.no_grad():
                model.weight[0, 0] = math.nan
        time.sleep(step_s)
        if sends and steps % (sends + steps % 7) == 0:
            fed.send()
        if not fed.step(tokens=8, metrics={"loss": loss.item()}):
            break
    print(f"weights finite {bool(torch.isfinite(model.weight).all())}", flush=True)

def slow(fed):
    train(fed, step_s=0.1)

def sending(fed):
    train(fed, sends=5)

def bulk(fed):
    train(fed, width=1_500_000)

def poisoned(fed):
    train(fed, poison=30)
'''


class Process:
    """A node's process, and its output line by line."""

    def __init__(self, *arguments, cwd, starter=None, inside="", open_files=0):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.lines = []
        limited = ("sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh") if open_files else ()
        self.popen = (
            starter.start(arguments, cwd, inside)
            if starter
            else subprocess.Popen(
                [*limited, sys.executable, "-m", "fsl_async.cli", *map(str, arguments)],
                cwd=cwd,
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self):
        """All output so far."""
        return "\n".join(self.lines)

    def wait_for(self, words, seconds=60.0):
        """Wait until a line of the output holds `words`; returns the line."""
        deadline = time.monotonic() + seconds * UNIT_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if words in line:
                    return line
            if self.popen.poll() is not None:
                self.reader.join()
                for line in list(self.lines):
                    if words in line:
                        return line
                break
            time.sleep(0.05)
        raise AssertionError(f"{words!r} never came; output:\n{self.text}")

    def end(self, seconds=60.0):
        """Wait for the end; returns the exit code."""
        try:
            code = self.popen.wait(seconds * UNIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end; output:\n{self.text}") from None
        self.reader.join()
        return code

    def signal(self, number):
        """Send a signal."""
        self.popen.send_signal(number)

    def kill(self):
        """Kill -9, and wait."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()
        self.reader.join()
        self.popen.stdout.close()


def pytest_configure(config):
    """Name the marker of this folder."""
    config.addinivalue_line(
        "markers", "cold: every process starts as users start it, and imports what it needs"
    )


ROLES = {"client", "server", "ps", "relay"}


class Site:
    """Starts nodes in one folder and ends all of them.

    With a `starter` (`warm.WarmStarter`), nodes are forked from it.
    """

    def __init__(self, folder, starter=None):
        self.starter = starter
        self.folder = folder
        self.run_dir = folder / "run"
        self.address = "127.0.0.1:0"
        self.processes = []
        (folder / "task.py").write_text(TASK)

    def start(self, *arguments, inside="", open_files=0):
        """Start a process.

        inside: a network namespace, for forked processes only. open_files: a limit; the process is
        not forked then.
        """
        role = arguments[arguments.index("--role") + 1] if "--role" in arguments else ""
        starter = self.starter if role in ROLES and not open_files else None
        assert starter or not inside
        process = Process(
            *arguments, cwd=self.folder, starter=starter, inside=inside, open_files=open_files
        )
        self.processes.append(process)
        return process

    def server(self, *more, every_s=1.5, open_files=0, **settings):
        """Start a parameter server and wait until it listens."""
        chosen = {
            "sync.every_s": every_s,
            "sync.clients": 3,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 5,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
        words = ("--role", "ps", "--run-dir", self.run_dir, *flags, *more, self.address)
        process = self.start(*words, open_files=open_files)
        line = process.wait_for("listening at")
        self.address = line.split("tcp://")[1].split(",")[0]
        return process

    def client(self, name, function="train", allow="deltas,metrics"):
        """Start a client of the test's task."""
        words = ("--name", name, "--task", f"{self.folder / 'task.py'}:{function}")
        return self.start("--role", "client", *words, "--allow", allow, self.address)

    def ledger(self, fact):
        """The ledger's lines of one kind."""
        path = self.run_dir / "ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        facts = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that is still being written
                facts.append(json.loads(line))
        return [one for one in facts if one["fact"] == fact]

    def wait_version(self, version, seconds=60.0):
        """Wait until the ledger has a version."""
        self.wait_until(
            lambda: any(one["version"] >= version for one in self.ledger("version")),
            f"version {version}",
            seconds,
        )

    def wait_until(self, condition, what, seconds=60.0):
        """Wait until `condition()` holds."""
        deadline = time.monotonic() + seconds * UNIT_S
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.05)
        outputs = "\n---\n".join(process.text for process in self.processes)
        raise AssertionError(f"{what}: never; outputs:\n{outputs}")

    def close(self):
        """Kill all processes."""
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="session")
def starter():
    """One starter for all tests."""
    made = WarmStarter()
    yield made
    made.close()


@pytest.fixture
def site(tmp_path, request):
    """A folder whose nodes end with the test.

    They are forked from a process that has imported torch, except with `@pytest.mark.cold`.
    """
    is_cold = request.node.get_closest_marker("cold")
    one = Site(tmp_path, None if is_cold else request.getfixturevalue("starter"))
    yield one
    one.close()
    bugs = [line for process in one.processes for line in process.lines if line.startswith("bug: ")]
    assert bugs == [], "a callback of a node raised"


@pytest.fixture
def interrupt():
    """Ctrl-C."""
    return signal.SIGINT

"""A real Slurm, and a parameter server whose clients are its jobs."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_ports
from slurm_cluster import Cluster, missing

BIN = Path(__file__).parents[2] / "bin"
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
"""Factor on time limits: a wait ends as soon as its condition holds, but a busy machine is slow."""

TASK = """
import time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    steps, goes_on = 0, True
    while goes_on:
        time.sleep(0.02)
        steps += 1
        goes_on = fed.step(tokens=8)
        if steps == 20:
            print("twenty steps", flush=True)
    print("tokens trained", 8 * steps, flush=True)
"""


class Training:
    """A parameter server and the folder of its clients' jobs."""

    def __init__(self, folder, cluster):
        self.folder = folder
        self.cluster = cluster
        self.run_dir = folder / "run"
        self.log = folder / "ps.log"
        # Known before it listens: the launch file has it.
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.popen = None
        self.jobs = []
        home = folder / "home"
        (home / "bin").mkdir(parents=True)
        shutil.copy(BIN / "fsl-node.sbatch", home / "bin")
        node = home / "bin" / "fsl-node"
        node.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fsl_async.cli "$@"\n')
        node.chmod(0o755)
        (folder / "task.py").write_text(TASK)
        self.script = home / "bin" / "fsl-node.sbatch"
        self.home = home

    def start(self, *more, every_s=600, **settings):
        """Start the parameter server and wait until it listens."""
        chosen = {
            "sync.every_s": every_s,
            "sync.clients": 4,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 3,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
        words = ["--role", "ps", "--run-dir", self.run_dir, *flags, *more, self.address]
        with self.log.open("a") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "fsl_async.cli", *map(str, words)],
                env={**self.cluster.environment, "PYTHONUNBUFFERED": "1"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.wait_for("listening at")

    def words(self, *more):
        """Return what follows `sbatch --job-name=fsl-NAME`."""
        environment = {
            "FSL_HOME": self.home,
            "FSL_SERVER": self.address,
            "OMP_NUM_THREADS": 1,
            "PYTHONUNBUFFERED": 1,
        }
        export = ",".join(["ALL", *(f"{key}={value}" for key, value in environment.items())])
        out = f"--output={self.folder}/%x-%j.log"
        task = ("--task", f"{self.folder / 'task.py'}:train")
        options = [word for word in more if not word.startswith("--grace")]
        grace = [part for word in more if word.startswith("--grace") for part in word.split("=")]
        return [out, f"--export={export}", *options, self.script, *task, *grace]

    def submit(self, name, *more):
        """Submit the job of a client; returns its number."""
        job = self.cluster.submit(f"--job-name=fsl-{name}", *self.words(*more))
        self.jobs.append((name, job))
        return job

    def wait_for(self, words, count=1, seconds=40.0):
        """Wait until `count` lines of the parameter server's output hold `words`."""
        return self._wait(self.log, words, count, seconds)

    def job_log(self, name, job):
        """Return the output of a job so far."""
        path = self.folder / f"fsl-{name}-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_job(self, name, job, words, count=1, seconds=40.0):
        """Wait until `count` lines of a job's output hold `words`; returns the last of them."""
        return self._wait(self.folder / f"fsl-{name}-{job}.log", words, count, seconds)

    def _wait(self, path, words, count, seconds):
        give_up_at = time.monotonic() + seconds * UNIT_S
        while time.monotonic() < give_up_at:
            text = path.read_text() if path.exists() else ""
            found = [line for line in text.splitlines() if words in line]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.1)
        outputs = "".join(
            f"--- {one.name}\n{one.read_text()}" for one in sorted(self.folder.glob("*.log"))
        )
        raise AssertionError(f"{words!r}, {count}: never\n{outputs}")

    def status_text(self, *more):
        """Return what `fsl-node status` prints."""
        words = [sys.executable, "-m", "fsl_async.cli", "status", *more, str(self.run_dir)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def ends(self, name):
        """Return how a client's processes ended, by `status --json`: times, and tokens lost."""
        found = json.loads(self.status_text("--json"))["clients"]
        (client,) = [one for one in found if one["name"] == name]
        return {why: (one["times"], one["tokens_lost"]) for why, one in client["ends"].items()}

    def accepted(self, name):
        """Return the tokens of a client's deltas in the ledger."""
        found = 0
        for line in (self.run_dir / "ledger.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                fact = json.loads(line)
                if fact["fact"] == "accepted" and fact["key"].startswith(f"{name}/"):
                    found += fact["tokens"]
        return found

    def close(self):
        """End the jobs and the parameter server."""
        for _, job in self.jobs:
            self.cluster.ask("scancel", "--signal=KILL", "--full", job, check=False)
            self.cluster.ask("scancel", job, check=False)
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """One Slurm for all tests of a process."""
    why = missing()
    if why:
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def training(tmp_path, cluster):
    """A parameter server to start; jobs and processes end with the test."""
    made = Training(tmp_path, cluster)
    yield made
    made.close()

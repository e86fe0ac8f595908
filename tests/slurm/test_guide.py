"""docs/SLURM.md, followed with two real Slurm clusters, keys, and a relay in front of one."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_ports
from slurm_cluster import Cluster, missing

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "SLURM.md"


def sbatch_words():
    """Return the words of the guide's first call of sbatch."""
    text = GUIDE.read_text()
    (block, *_) = re.findall(r"```\n(sbatch .*?)```", text, re.DOTALL)
    return shlex.split(block.replace("\\\n", " "))


def test_the_guides_job_is_one_that_the_batch_script_takes():
    """The name of the job is the client's, and words behind the script are fsl-node's."""
    words = sbatch_words()
    script = words.index("bin/fsl-node.sbatch")
    assert "--job-name=fsl-site-a" in words[:script]
    assert any(word.startswith("--export=ALL,FSL_SERVER=fsl://") for word in words[:script])
    assert words[script + 1 :] == ["--data", "/data/text"]


class People:
    """The operator and the people of two sites: each has a home, and runs fsl-node there."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []
        program = folder / "checkout" / "bin" / "fsl-node"
        program.parent.mkdir(parents=True)
        shutil.copy(ROOT / "bin" / "fsl-node.sbatch", program.parent)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fsl_async.cli "$@"\n')
        program.chmod(0o755)

    def environment(self, who):
        """Return the environment of one of them."""
        keys = str(self.folder / f"home-{who}" / ".config" / "fsl-async")
        return {**os.environ, "FSL_KEYS": keys, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def run(self, who, *words):
        """Run fsl-node to its end; returns what it printed."""
        done = subprocess.run(
            ["bin/fsl-node", *map(str, words)],
            cwd=self.folder / "checkout",
            env=self.environment(who),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    def start(self, who, *words):
        """Start a node; its output goes to a file of its own."""
        with (self.folder / f"{who}.log").open("w") as out:
            self.processes.append(
                subprocess.Popen(
                    ["bin/fsl-node", *map(str, words)],
                    cwd=self.folder / "checkout",
                    env=self.environment(who),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_for(self, name, words, seconds=120.0):
        """Wait for a line of a log file; returns it."""
        path = self.folder / name
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            text = path.read_text() if path.exists() else ""
            for line in text.splitlines():
                if words in line:
                    return line
            time.sleep(0.2)
        texts = [f"--- {one.name}\n{one.read_text()}" for one in sorted(self.folder.glob("*.log"))]
        raise AssertionError(f"{words!r}: never in {name}\n" + "\n".join(texts))

    def close(self):
        """End the nodes."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def people(tmp_path):
    """The operator and two sites."""
    made = People(tmp_path)
    yield made
    made.close()


@pytest.mark.sweep
def test_two_clusters_train_one_model_as_the_guide_says(people, tmp_path):
    """What a new user types, with keys; the second cluster reaches its relay only."""
    if missing():
        pytest.skip(missing())
    ps, relay = free_ports(2)
    people.run("operator", "keys", "new")
    small = ("model.preset=0.5m", "train.threads=1", "sync.every_s=5", "data.sharding='local'")
    settings = [word for one in small for word in ("--set", one)]
    keys = ("--keys", people.environment("operator")["FSL_KEYS"])  # loopback is plain by default
    words = ("--role", "ps", "--run-dir", "runs/two", "--set", "sync.clients=2", *settings, *keys)
    people.start("operator", *words, f"127.0.0.1:{ps}")
    address = re.search(r"fsl://\S+key=[^\s']+", people.wait_for("operator.log", "key="))[0]
    for site in ("site-a", "site-b"):
        people.run(site, "keys", "new")
        people.run(
            "operator", "keys", "trust", people.run(site, "keys", "pub").strip(), "--name", site
        )
    people.start("relay", "--role", "relay", "--listen", f"127.0.0.1:{relay}", address)
    people.wait_for("relay.log", str(relay))

    text = tmp_path / "text"
    text.mkdir()
    shutil.copy(ROOT / "docs" / "WIRE.md", text / "wire.txt")
    with Cluster(_folder(tmp_path, "a")) as one, Cluster(_folder(tmp_path, "b")) as other:
        for site, cluster in (("site-a", one), ("site-b", other)):
            at = address if site == "site-a" else address.replace(f":{ps}?", f":{relay}?")
            words = [
                word.replace("site-a", site)
                .replace("/data/text", str(text))
                .replace("fsl://ps.example.org:7100?key=...", at)
                for word in sbatch_words()
                if not word.startswith("--gres")
            ]
            script = words.index("bin/fsl-node.sbatch")
            log = f"--output={tmp_path}/{site}.log"
            done = subprocess.run(
                [*words[:script], log, *words[script:]],
                cwd=people.folder / "checkout",
                env={**people.environment(site), **cluster.environment}
                | {"FSL_KEYS": people.environment(site)["FSL_KEYS"]},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        for site in ("site-a", "site-b"):
            people.wait_for(f"{site}.log", "joined run")
        people.wait_for("operator.log", "2 of 2 called clients merged")
        status = people.run("operator", "status", "runs/two")
    assert "connections are encrypted" in status
    assert re.search(r"^site-a .*\n(.*\n)*site-b ", status, re.MULTILINE)


def _folder(parent, name):
    made = parent / f"slurm-{name}"
    made.mkdir()
    return made

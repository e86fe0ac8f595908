"""Split learning by command: configuration file, data sets, own models, a restarted client."""

import json
import os
import time

import numpy as np
import pytest

pytestmark = pytest.mark.slow

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))

CONFIG = """
[sync]
clients = 2
min_clients = 2
[session]
heartbeat_every_s = 0.5
expire_after_s = 3.0
[data]
partition = "dirichlet"
alpha = 0.5
[train]
batch = 8
threads = 1
device = "cpu"
[split]
method = "fsl-sage"
cut = "2"
listen = "127.0.0.1:0"
samples = 16
upload_every = 1
align_every = 2
align_passes = 2
"""

OWN = """
from torch import nn

def net(shape, classes, width=6):
    return nn.Sequential(
        nn.Conv2d(shape[0], width, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(width * 64, classes)
    )

def small(shape, outputs):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(shape[0], outputs))
"""


@pytest.fixture
def cifar(tmp_path):
    """A folder in CIFAR-10's binary layout: 90 images."""
    folder = tmp_path / "cifar"
    folder.mkdir()
    records = np.random.default_rng(0).integers(0, 256, (90, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(90) % 10
    (folder / "data_batch_1.bin").write_bytes(records.tobytes())
    return folder


def ledger(site, part):
    """All complete lines of a server's ledger."""
    path = site.run_dir / part / "ledger.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def incarnations(site, name):
    """Number of a client's processes with uploads that the split server has trained on."""
    trained = [one["key"] for one in ledger(site, "server") if one.get("outcome") == "trained"]
    return len({key.split("/")[1] for key in trained if key.startswith(f"{name}/")})


def wait_incarnations(site, name, count):
    """Wait until the split server has trained on uploads of `count` processes."""
    deadline = time.monotonic() + 60 * UNIT_S
    while incarnations(site, name) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert incarnations(site, name) == count, "\n---\n".join(each.text for each in site.processes)


def test_images_by_command_with_a_client_killed_and_back(site, cifar, interrupt):
    """The README's commands must work, with a client that is killed and restarted."""
    (site.folder / "fsl.toml").write_text(CONFIG)
    (site.folder / "own.py").write_text(OWN)
    code = ["--model", "own.py:net", "--auxiliary", "own.py:small"]
    start = ["--role", "server", "--with-ps", "--config", "fsl.toml", "--data", cifar]
    server = site.start(*start, *code, "--run-dir", site.run_dir, "127.0.0.1:0")
    line = server.wait_for("--role client")
    own = "--model FILE.py:FUNCTION --auxiliary FILE.py:FUNCTION --data PATH"
    assert f"{own} --allow deltas,activations,labels fsl://" in line
    site.address = server.wait_for("parameter server at").split("tcp://")[1]

    def client(name):
        options = ("--data", cifar, "--allow", "deltas,activations,labels", *code)
        return site.start("--role", "client", "--name", name, *options, site.address)

    first = client("a")
    victim = client("b")
    server.wait_for("2 of 2 called clients merged")
    wait_incarnations(site, "b", 1)  # a delta may be merged before its uploads are trained
    victim.kill()
    back = client("b")
    server.wait_for("b is back as a new process")
    wait_incarnations(site, "b", 2)
    server.signal(interrupt)
    assert server.end() == 130, server.text
    for each in (first, back):
        assert each.end() == 0, each.text
    leases = {(one["name"], one["index"]) for one in ledger(site, "ps") if one["fact"] == "lease"}
    assert sorted(part for _, part in leases) == [0, 1], "each keeps its part"

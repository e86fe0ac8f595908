"""A client of two ranks as real processes: torchrun, a parameter server, SIGKILL."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_ports

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.tools.demo.fsdp import ranks_of

pytestmark = [pytest.mark.slow, pytest.mark.cold]


def gang(site, *more):
    """Start a client of two ranks."""
    task = f"{site.folder / 'task.py'}:train"
    options = ("--name", "gang", "--task", task, "--ranks", "2", *more)
    return site.start("--role", "client", *options, site.address)


def named_memory():
    """Shared memory that Python or torch has given a name; other programs have some as well."""
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm", "torch"))}


def test_a_killed_rank_comes_back_and_the_run_ends_in_good_order(site):
    """The client stays in the run, nothing is lost or doubled, and nothing stays behind."""
    before = named_memory()
    server = site.server(sync__clients=1)
    client = gang(site)
    client.wait_for("all 2 ranks are here")
    site.wait_version(1)
    ranks = ranks_of(client.popen.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    client.wait_for("is gone")
    site.wait_until(lambda: client.text.count("all 2 ranks are here") == 2, "they are back")
    merged = len(site.ledger("accepted"))
    site.wait_until(lambda: len(site.ledger("accepted")) > merged, "a delta of the new ranks")
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert "ends the run for all clients; SIGTERM would let it go on later" in server.text
    assert client.end() == 0
    assert client.text.count("weights finite True") == 2
    assert audit_run(site.run_dir).complaints() == []
    tokens = {one["tokens"] % 16 for one in site.ledger("accepted")}
    assert tokens == {0}  # two ranks of 8 tokens a step: no delta of one rank alone
    assert ranks_of(client.popen.pid) == []
    assert named_memory() <= before


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import fsl_async
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with fsl_async.join(sys.argv[1], name="cluster") as fed:
    fed.attach(model)
    going = True
    while going:
        model(torch.ones(4, 8)).pow(2).mean().backward()
        optimizer.step(); optimizer.zero_grad()
        going = fed.step(tokens=4)
finite = all(one.to_local().isfinite().all() for one in model.parameters())
print(f"rank {dist.get_rank()} left, finite {bool(finite)}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.sweep
def test_two_torchruns_are_one_client(site):
    """As on two machines: rank 1 has no node beside it."""
    server = site.server(sync__clients=1)
    (site.folder / "script.py").write_text(SCRIPT)
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--max-restarts=0", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    begun = [
        subprocess.Popen(
            [*torchrun, "--rdzv-id=x", "script.py", site.address],
            cwd=site.folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        site.wait_version(3)
        server.signal(signal.SIGINT)
        outputs = [one.communicate(timeout=60)[0] for one in begun]
    finally:
        for one in begun:
            one.kill()
            one.wait()
    assert [one.returncode for one in begun] == [0, 0]
    assert "rank 0 left, finite True" in "".join(outputs)
    assert "rank 1 left, finite True" in "".join(outputs)
    assert audit_run(site.run_dir).complaints() == []
    assert {one["tokens"] % 8 for one in site.ledger("accepted")} == {0}


@pytest.mark.sweep
def test_a_task_that_cannot_be_trained_is_one_line(site):
    """An error that would come again ends torchrun too, and is the node's."""
    site.server(sync__clients=1)
    (site.folder / "task.py").write_text("def train(fed):\n    fed.step()\n")
    client = gang(site)
    assert client.end() == 2
    assert "error: fed.step came before fed.attach(model)" in client.text
    assert "Traceback" not in client.text
    assert client.text.count("gang trains on") == 1

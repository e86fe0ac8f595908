"""Learning rates over real processes: the parameter server announces how far the run is."""

import json
import time

import pytest

pytestmark = pytest.mark.slow

TASK = """
import json, time
import torch
from torch import nn

def train(fed):
    model = nn.Linear(4, 1)
    fed.attach(model)
    optimizer = fed.optimizer(model, optimizer="adamw", learning_rate=0.5)
    scheduler = fed.scheduler(optimizer)
    with open(f"{fed.client_name}.jsonl", "w", buffering=1) as file:
        while True:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rate = optimizer.param_groups[0]["lr"]
            file.write(json.dumps([fed.version, fed.progress, rate]) + "\\n")
            time.sleep(0.02)
            if not fed.step(tokens=1):
                break
"""


def test_a_decay_reaches_every_client_and_survives_a_restart(site):
    """Asked for while the run goes on; a parameter server that is killed goes on with it."""
    (site.folder / "task.py").write_text(TASK)
    task = f"{site.folder / 'task.py'}:train"
    server = site.server(every_s=1, train__warmup_steps=0, session__expire_after_s=30)
    clients = [
        site.start("--role", "client", "--name", name, "--task", task, site.address)
        for name in ("a", "b")
    ]
    site.wait_version(2)
    asked = site.start("decay", str(site.run_dir), "--rounds", "8", "--json")
    assert asked.end() == 0
    (kept,) = site.ledger("decay")
    site.wait_version(kept["limits"]["rounds"] - 5)
    server.kill()
    time.sleep(0.5)
    again = site.server(every_s=1, train__warmup_steps=0)
    assert again.end() == 0, "it ends by the limit of the decay"
    assert [client.end() for client in clients] == [0, 0]
    assert site.ledger("version")[-1]["version"] == kept["limits"]["rounds"]
    for name in ("a", "b"):
        lines = (site.folder / f"{name}.jsonl").read_text().splitlines()
        seen = [json.loads(line) for line in lines]
        before = [rate for _, progress, rate in seen if progress is None]
        during = [(progress, rate) for _, progress, rate in seen if progress is not None]
        assert before
        # A client that came after version 0 warms up for some steps.
        assert before == sorted(before)
        assert before[-1] == 0.5, "without an end the rate stays"
        assert max(progress for progress, _ in during) > 0.85
        assert min(rate for _, rate in during) < 0.5 * 0.35
        late = [one for one in during if one[0] > kept["decays_from"] + 0.05]
        assert all(rate < 0.5 for _, rate in late[2:])

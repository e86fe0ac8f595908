"""A training function that hangs, as a process: reported at both ends, and ended if configured."""

import pytest

pytestmark = pytest.mark.slow

HANGS = """
import time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    for step in range(100_000):
        time.sleep(120.0 if step == 30 else 0.02)
        if not fed.step(tokens=8):
            break
"""


@pytest.mark.parametrize("restart", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_training_that_hangs(site, restart):
    """Its heartbeats go on, so it is reported; with train.hang_restart it ends with 64 and a
    goodbye.
    """
    settings = {"train__hang_least_s": 1.5, "train__hang_restart": str(restart).lower()}
    server = site.server(every_s=600, **settings)
    path = site.folder / "hangs.py"
    path.write_text(HANGS)
    client = site.start("--role", "client", "--name", "a", "--task", f"{path}:train", site.address)
    client.wait_for("training hangs: no step for")
    if restart:
        assert client.end(20) == 64
        assert "stopped: training hangs" in client.lines[-1]
        server.wait_for("a left: it ended its session")
    else:
        server.wait_for("a hangs: its training has made no step for")
        assert client.popen.poll() is None

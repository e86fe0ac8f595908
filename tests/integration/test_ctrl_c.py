"""Ctrl-C at a client, once and twice, with real processes."""

import signal
import time

import pytest

pytestmark = pytest.mark.slow

SLOW = """
import time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    while True:
        print("a step begins", flush=True)
        time.sleep(120)
        if not fed.step(tokens=8):
            break
"""


def test_twice_ends_a_client_in_a_long_step(site):
    """A step may last minutes; the second Ctrl-C does not wait for its end."""
    site.server()
    path = site.folder / "slow.py"
    path.write_text(SLOW)
    task = f"{path}:train"
    client = site.start("--role", "client", "--name", "a", "--task", task, site.address)
    client.wait_for("a step begins")
    client.signal(signal.SIGINT)
    client.wait_for("once more stops at once")
    client.signal(signal.SIGINT)
    begun = time.monotonic()
    assert client.end() == 130
    assert time.monotonic() - begun < 10.0  # about one on a machine with nothing else to do
    assert client.lines[-1] == "stopped: Ctrl-C"
    assert "Traceback" not in client.text

"""Demos whose children die: the children's error is the verdict. Real processes, no nodes."""

import asyncio
import sys
import time
from types import SimpleNamespace

import pytest

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child
from fsl_async.errors import FslError
from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo import groups, pretrain, runner, split
from fsl_async.tools.demo.scenario import Choices, Node

FAST = RestartRules(first_wait_s=0.01, longest_wait_s=0.02, budget=1000)
SERVES = (
    'print(\'{"event": "listening", "role": "ps", "address": "tcp://127.0.0.1:1"}\', flush=True)\n'
    "import time; time.sleep(60)"
)
DIES = "import sys; sys.exit('error: torch has no Muon')"

UNSEEN = SimpleNamespace(update=lambda *_: None, close=lambda: None)


@pytest.mark.parametrize("make", [pretrain.pretrain, split.split, groups.groups])
def test_clients_that_only_die_are_the_verdict(tmp_path, monkeypatch, make):
    """It was "no round was merged; give it more --seconds", after all of the seconds."""

    def script(node, *_):
        text = DIES if node.role == "client" else SERVES
        return Child(node.name, (sys.executable, "-S", "-c", text))

    monkeypatch.setattr(runner, "_RULES", FAST)
    monkeypatch.setattr(Node, "child", script)
    scenario = make(Choices(clients=2, run_dir=tmp_path))
    played = runner.Runner(scenario, Stopper(), print, lambda: UNSEEN).play()
    begun = time.monotonic()
    with pytest.raises(FslError) as raised:
        asyncio.run(played)
    assert time.monotonic() - begun < 20.0
    assert raised.value.exit_code == 1
    assert "client-1, " in raised.value.message
    assert raised.value.message.endswith(" times: torch has no Muon")

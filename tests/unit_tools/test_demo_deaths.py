"""The runner of demos with real processes that are no nodes: starts, faults, deaths, ends."""

import asyncio
import sys
import time
from collections import deque

import pytest
from attrs import evolve

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child
from fsl_async.errors import FslError
from fsl_async.observe.journal_lines import body_of, line_of, read_line
from fsl_async.process.stopper import Stopper
from fsl_async.roles.groups.effects import KeepAttempt, KeepDecision
from fsl_async.roles.machine import Done
from fsl_async.tools.demo import groups, pretrain, runner, split
from fsl_async.tools.demo.scenario import Choices, Node, Stage

FAST = RestartRules(first_wait_s=0.01, longest_wait_s=0.02, budget=1000)
SERVES = (
    'print(\'{"event": "listening", "role": "ps", "address": "tcp://127.0.0.1:1"}\', flush=True)\n'
    "import time; time.sleep(60)"
)
WAITS = "import time; time.sleep(60)"
DIES = "import sys; sys.exit('error: torch has no Muon')"


def test_a_decision_counts_once_its_line_is_in_the_ledger():
    """The demo of groups waits for decisions; without any it would end as a failure."""
    rounds, decision = groups.GlobalRounds(), KeepDecision(1, 1, "d", {"north": (0, 9)})
    for item in (Done(KeepAttempt(0, 1)), decision, Done(decision, "disk full"), Done(decision)):
        kind, body = body_of(item)
        rounds.see("north", read_line(line_of('"n":1', "event", kind, None, body).encode()))
    assert len(rounds.decided) == 1


@pytest.mark.parametrize("make", [pretrain.pretrain, split.split, groups.groups])
def test_clients_that_only_die_are_the_verdict(tmp_path, monkeypatch, make):
    """It was "no round was merged; give it more --seconds", after all of the seconds."""

    def script(node, *_):
        text = DIES if node.role == "client" else SERVES
        return Child(node.name, (sys.executable, "-S", "-c", text))

    monkeypatch.setattr(Node, "child", script)
    made, begun = make(Choices(clients=2, run_dir=tmp_path)), time.monotonic()
    made = evolve(made, rules=FAST, leave_s=0.2)
    with pytest.raises(FslError) as raised:
        asyncio.run(runner.Runner(made, Stage(print, Stopper()), lambda *_: None).play())
    assert time.monotonic() - begun < 20.0
    assert raised.value.exit_code == 1
    assert "client-1, " in raised.value.message
    assert raised.value.message.endswith(" times: torch has no Muon")


def played(tmp_path, monkeypatch, server=SERVES, client=WAITS, **changes):
    """A demo of pretraining whose nodes are such programs."""
    texts = {"ps": server, "client": client}
    monkeypatch.setattr(
        Node,
        "child",
        lambda node, *_: Child(node.name, (sys.executable, "-S", "-c", texts[node.role])),
    )
    made = pretrain.pretrain(Choices(clients=2, run_dir=tmp_path))
    made = evolve(made, rules=FAST, leave_s=0.2, drain_s=5.0)
    made = evolve(made, **changes)
    return asyncio.run(runner.Runner(made, Stage(print, Stopper()), lambda *_: None).play())


def test_a_server_that_does_not_listen_ends_the_demo(tmp_path, monkeypatch):
    """Clients would wait for it, and the user for them."""
    found = played(tmp_path, monkeypatch, server=WAITS, listen_s=0.5)
    assert found.problems == ["the parameter server did not listen within 0.5 s"]


def test_a_server_that_ends_by_itself_ends_the_demo(tmp_path, monkeypatch):
    """A run of so many rounds ends so."""
    found = played(tmp_path, monkeypatch, server=SERVES.replace("60", "1"))
    assert (found.problems, found.state.news) == ([], deque())

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
from fsl_async.tools.demo import groups, pretrain, runner, scenario, split
from fsl_async.tools.demo.scenario import Choices, Fault, Node, Stage

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


def test_a_fault_is_injected_once_and_its_victim_launched_again(tmp_path, monkeypatch):
    """Every summary is computed from what a fault did, to which node and when."""
    tried = []

    def what(children, name):
        tried.append(name)
        return scenario.kill(children, name) if len(tried) > 1 else ""

    found = played(
        tmp_path,
        monkeypatch,
        faults=[Fault("client-2", lambda run: run.elapsed() > 0.5, what)],
        is_over=lambda run: "client-2" in run.launched,
    )
    assert tried == ["client-2"] * 2
    assert [one.name for one in found.faults] == ["client-2"]
    assert 0.4 < found.faults[0].begun - found.begun < found.launched["client-2"] + 0.1
    kinds = [one.kind for one in found.state.news]
    assert kinds == ["killed", "launched", "ending"]
    assert found.problems == []


def test_a_killed_server_may_fail_at_its_relaunch(tmp_path, monkeypatch):
    """The supervisor launches it once more, and the summary tells of it."""
    starts = tmp_path / "starts"
    fails_second = (
        f"import sys; file = open({str(starts)!r}, 'a'); file.write('x'); file.flush()\n"
        "if file.tell() == 2: sys.exit(1)\n"
    )
    found = played(
        tmp_path,
        monkeypatch,
        server=fails_second + SERVES,
        faults=[Fault("server", lambda run: run.elapsed() > 0.5, scenario.kill)],
        is_over=lambda _: starts.exists() and len(starts.read_text()) == 3,
        is_begun=lambda _: True,
    )
    assert len(found.faults) == 1
    assert any("server" in line for line in found.problems)


def test_a_server_that_does_not_listen_ends_the_demo(tmp_path, monkeypatch):
    """Clients would wait for it, and the user for them."""
    found = played(tmp_path, monkeypatch, server=WAITS, listen_s=0.5)
    assert found.problems == ["the parameter server did not listen within 0.5 s"]


def test_a_server_that_ends_by_itself_ends_the_demo(tmp_path, monkeypatch):
    """A run of so many rounds ends so."""
    found = played(tmp_path, monkeypatch, server=SERVES.replace("60", "1"))
    assert (found.problems, found.state.news) == ([], deque())


def test_a_server_waits_until_it_is_due(tmp_path, monkeypatch):
    """Its clients wait for it."""
    made = pretrain.pretrain(Choices(clients=1, run_dir=tmp_path))
    server = evolve(made.servers[0], when=lambda run: run.elapsed() > 0.5)
    started = []
    start = runner.Supervisor.start

    def watched(self, child):
        started.append((child.name, time.time()))
        start(self, child)

    monkeypatch.setattr(runner.Supervisor, "start", watched)
    found = played(
        tmp_path, monkeypatch, nodes=[server, made.clients[0]], is_over=lambda _: len(started) == 2
    )
    assert [name for name, _ in started] == ["server", "client-1"]
    assert started[0][1] - found.begun > 0.5

"""The node's side of a gang, with a rank 0 in a thread that speaks for all."""

import os
import threading
import time

import pytest

from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.gang.link import Link, listener
from fsl_async.nodes.client import gang_shell
from fsl_async.nodes.client.gang_shell import GangShell
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.sync.events import Attached, PaceReached, Rebased, Snapshotted
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec

VALUES = 10
MANIFEST = Manifest.from_shapes([("w", (VALUES,))], [])
DONE = {"tokens": 8, "steps": 2, "finite": True, "metrics": {"loss": 1.0}, "facts": {}}


class Node:
    """A shell that serves connections, and the events of its exchange side."""

    def __init__(self):
        self.said, self.events, self.links = [], [], []
        self.shell = shell = GangShell(self.said.append)
        coder = DeltaCoder(CodecSpec(format="fp32"))
        self.exchange = Exchange(shell, coder, self.events.append, allocate=shell.slots.allocate)
        self.name = f"fsl-test-shell-{os.getpid()}-{id(self)}"
        self.listening = listener(self.name)
        shell.connect(self.exchange, self.listening, lambda: False, TraceHash())
        shell.welcomed(b"welcome")

    def until(self, holds):
        """Serve until something holds."""
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline, (self.said, self.events, self.shell.failure)
            if self.shell.has_work:
                self.shell.carry_out()
            else:
                self.shell.turn()

    def event(self):
        """The next event of the exchange side."""
        self.until(lambda: self.events)
        return self.events.pop(0)

    def rank(self, number=0, generation=0):
        """A rank's end, which has said hello."""
        link = Link.dial(self.name)
        self.links.append(link)
        link.send("hello", number, 2, generation)
        self.until(lambda: (number, generation) in self.shell._links.values())
        return link

    def directives(self, link, count):
        """The next directives of rank 0."""
        found = []

        def more():
            one = link.receive(0.01)
            found.extend([] if one is None else [one])
            return len(found) == count

        self.until(more)
        return found

    def form(self, generation=0):
        """A gang that has attached; returns its rank 0."""
        link = self.rank(generation=generation)
        link.send("shape", VALUES)
        *_, (name, slots, paths) = self.directives(link, 2)
        assert (name, len(slots), len(paths)) == ("slots", 3, 3)
        link.send("attached", MANIFEST.to_wire(), MANIFEST.frozen_to_wire())
        return link

    def begin(self):
        """A gang whose weights are version 0; returns its rank 0."""
        link = self.form()
        assert isinstance(self.event(), Attached)
        self.exchange.request_rebase(0, self.exchange.adopt_initial())
        answers(link, ("moved", False, 0))
        assert self.event() == Rebased(0, 0)
        return link


def answers(link, *messages):
    """Have rank 0 send these after the next order, in a thread; () closes its connection."""

    def run():
        assert link.receive(30)[0] in {"move", "snapshot", "round"}
        for message in messages:
            link.send(*message)
        if not messages:
            link.close()

    threading.Thread(target=run).start()


@pytest.fixture
def node():
    made = Node()
    yield made
    for link in made.links:
        link.close()
    made.shell.close()
    made.listening.close()


def test_an_order_is_answered_when_the_ranks_have_carried_it_out(node):
    """With their counts."""
    link = node.begin()
    node.exchange.request_snapshot(1)
    answers(link, ("beat", {"step": 2, "tokens": 8}), ("snapshot", DONE), ("pace_reached",))
    found = node.event()
    assert isinstance(found, Snapshotted)
    assert (found.tokens, found.steps, found.metrics) == (8, 2, {"loss": 1.0})
    assert isinstance(node.event(), PaceReached)
    assert (node.shell.meter.tokens, node.shell.meter.sent_tokens) == (8, 8)


def test_a_gang_that_is_lost_answers_nothing_and_the_next_one_begins_at_the_base(node):
    """And gets what holds for good; what was asked in between is answered with nothing too."""
    first = node.begin()
    other = node.rank(1)
    node.shell.clock.announced(RunPosition(tokens=7))
    for steps in (3, 5):
        node.exchange.count_steps(steps)
    node.until(lambda: "pace" in node.shell._lasting)
    assert [one[0] for one in node.directives(first, 3)] == ["position", "pace", "pace"]
    node.exchange.request_snapshot(1)
    answers(first)
    assert (node.event().tokens, node.said[-1].partition(":")[0]) == (0, "rank 0 is gone (closed)")
    with pytest.raises(EOFError):
        other.receive()
    # Ranks of the lost gang may still write the vector of the order.
    assert sum(slot.is_retired for slot in node.shell.slots._slots) == 1
    node.exchange.request_snapshot(2)
    assert node.event().tokens == 0
    last = node.rank(generation=1)
    told = node.directives(last, 3)
    assert [told[0], told[2]] == [["welcome", b"welcome"], ["pace", 5]]
    node.exchange.request_snapshot(3)
    assert node.event().tokens == 0
    assert last.receive(0.0) is None, "ranks that have no model yet can map no slots"
    last.send("shape", VALUES)
    node.directives(last, 1)
    last.send("attached", MANIFEST.to_wire(), MANIFEST.frozen_to_wire())
    orders = []

    def move():
        orders.append(last.receive(30))
        last.send("moved", True, 0)

    thread = threading.Thread(target=move)
    thread.start()
    node.until(lambda: node.said[-1] == "all 2 ranks are here" and not node.shell.has_work)
    thread.join()
    assert orders[0][:3] == ["move", 0, "take"]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_that_is_gone_ends_its_gang(node, rank):
    """And a rank 0 that says hello again replaces it."""
    node.begin()
    links = [node.links[0], node.rank(1)]
    links[rank].close()
    node.until(lambda: "is gone" in node.said[-1])
    assert node.said[-1].startswith(f"rank {rank} is gone (closed): 0 tokens since")
    node.form(generation=1)
    node.until(lambda: node.said[-1] == "all 2 ranks are here")
    node.rank(generation=2)
    assert node.said[-1].startswith("torchrun started its ranks again")


def test_the_base_is_read_beside_an_order(node):
    """Ranks in fed.at_version have not come to the order yet, which waits for them."""
    link = node.begin()
    node.exchange.request_snapshot(1)
    read = []

    def ranks():
        order = link.receive(30)
        link.send("want_base")
        read.append(link.receive(30))
        link.send("base_read")
        link.send(order[0], DONE)

    thread = threading.Thread(target=ranks)
    thread.start()
    assert node.event().tokens == 8
    thread.join()
    assert read[0][:2] == ["base", 0]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("failed", "no data", 2)], "no data"),
        ([("shape", VALUES), ("attached", [], 7)], ""),
        ([("none",)], ""),
    ],
)
def test_an_error_that_would_come_again_is_the_nodes(node, messages, text):
    """Anything that is no message of a rank ends its connection alone."""
    link = node.rank()
    for message in messages:
        link.send(*message)
    node.until(lambda: node.shell.failure or node.said)
    if text:
        assert node.shell.failure == (text, 2)
    else:
        assert "it broke the protocol" in node.said[0]


def test_without_ranks_the_node_gives_up(node, monkeypatch):
    """At first, and after each loss of a gang."""
    monkeypatch.setattr(gang_shell, "WAIT_S", 0.2)
    link = node.begin()
    assert node.shell.failure is None
    link.close()
    node.until(lambda: node.shell.failure)
    assert node.shell.failure == ("no ranks came within 0.2 s", 1)


def test_a_refusal_comes_before_the_welcome():
    """A run that refuses this client ends ranks that wait for its welcome."""
    node = Node()
    node.shell._posted.get()
    node.shell.refuse("full", "no")
    assert node.directives(node.rank(), 1) == [["refuse", "full", "no"]]
    node.shell.close()
    node.listening.close()

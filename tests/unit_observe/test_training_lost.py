"""What clients' processes lost when they ended, from lines of a journal."""

import pytest
from deltas import delta_of, stored_of
from facts import FactWriter, line_of

from fsl_async.observe.clients import MOST_REASONS, OTHER, Ended, Training, client_dict, lost_words
from fsl_async.observe.journal_lines import as_fields, type_of
from fsl_async.observe.run_state import RunState
from fsl_async.roles.machine import ClientLeft, Offered, Send
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey

KILLED = "no message came from it"


class Run:
    """Applies events of one client, a, to a state."""

    def __init__(self, role="ps"):
        self.state, self.facts = RunState(), FactWriter(self)
        self.state.apply({"type": "node_started", "t": 1.0, "role": role})

    def take(self, *items):
        """Apply events and effects."""
        self.facts.write(items, 2.0)

    def event(self, item, now):
        """Apply an event or an effect."""
        self.state.apply({"type": type_of(item), "t": now, **as_fields(item)})

    effect = event

    def fact(self, item, now):
        """Apply a fact."""
        self.state.apply(line_of(item, now))

    def hello(self, incarnation):
        """A process of the client joins."""
        self.take(ev.ClientHello("a", incarnation, "", -1, ""))

    def beat(self, tokens):
        """A heartbeat reports its tokens so far."""
        self.take(ev.HeartbeatReceived("a", {"tokens": tokens, "step": 1}))

    def offer(self, incarnation, sequence, tokens):
        """Offer a delta; returns what stores it."""
        key = DeltaKey("a", incarnation, 0, sequence)
        self.take(Offered("a", msg.DeltaMeta(delta_of(key, tokens=tokens)), "s"))
        return ev.DeltaStored("a", stored_of(key, tokens=tokens), None)

    @property
    def ends(self):
        """By reason: how often, and tokens lost; as --json has them."""
        made = client_dict(self.state.clients["a"], 3.0)
        assert made["tokens_lost"] == sum(one["tokens_lost"] for one in made["ends"].values())
        return {why: (one["times"], one["tokens_lost"]) for why, one in made["ends"].items()}


@pytest.fixture
def run():
    made = Run()
    made.hello(5)
    return made


def test_a_killed_process_loses_what_it_had_not_sent(run):
    """A session that is lost loses nothing yet; another process shows that the work is gone."""
    run.beat(100)
    run.take(run.offer(5, 1, 80))
    run.beat(250)
    assert run.ends == {}
    run.take(ClientLeft("a", 5, "expired"))
    assert run.ends == {KILLED: (1, 170)}
    run.hello(5)
    assert run.ends == {}, "it came back as the same process"
    run.take(ClientLeft("a", 5, "expired"))
    run.hello(6)
    assert run.ends == {KILLED: (1, 170)}
    run.beat(30)
    run.take(ClientLeft("a", 6, "expired"))
    assert run.ends == {KILLED: (2, 200)}


def test_a_preempted_process_loses_nothing_in_good_order(run):
    """Its last delta has all that it trained; the reason is that of its goodbye."""
    run.beat(100)
    run.take(run.offer(5, 1, 140), ClientLeft("a", 5, "bye", "SIGTERM"))
    assert run.ends == {"SIGTERM": (1, 0)}
    run.hello(6)
    assert run.ends == {"SIGTERM": (1, 0)}
    words = lost_words("a", run.state.clients["a"].ends)
    assert words == "a lost 0 tokens when its processes ended: 0 (SIGTERM, 1 time)"


def test_a_delta_that_is_stored_after_the_goodbye_is_not_lost(run):
    """The disk may be slower than the client's end; one that never is stored is lost."""
    stored = run.offer(5, 1, 140)
    run.take(ClientLeft("a", 5, "bye", "SIGTERM"))
    assert run.ends == {"SIGTERM": (1, 140)}
    run.take(stored, stored, Send("a", msg.Accepted(stored.stored.delta.key)))
    assert run.ends == {"SIGTERM": (1, 0)}
    assert run.state.clients["a"].training.settled == 140, "once"


def test_a_split_server_and_the_end_of_a_run_count_nothing(run):
    """There nothing is kept by deltas; a run that ends has merged what there was."""
    split = Run("server")
    split.hello(5)
    split.beat(100)
    split.take(ClientLeft("a", 5, "expired"))
    assert split.ends == {KILLED: (1, 0)}
    run.beat(100)
    run.state.apply({"type": "finish", "t": 3.0, "reason": "end", "exit_code": 0})
    run.take(ClientLeft("a", 5, "bye", "the run is over"))
    assert run.ends == {}


def test_reasons_of_peers_are_bounded():
    """A goodbye has any text: the state must not grow with it."""
    training = Training()
    for number in range(2 * MOST_REASONS):
        training.has_trained(1)
        training.end(f"reason {number}")
        training.begin("unused")
    assert len(training.ends) == MOST_REASONS + 1
    assert training.ends[OTHER] == Ended(MOST_REASONS, MOST_REASONS)

"""The facts of a parameter server: what a machine decides, from the events of a run."""

import pytest
from configs import guard_of
from deltas import key, stored_of

from fsl_async.roles.client_facts import ClientFact
from fsl_async.roles.machine import ClientLeft, Done, Greeted, Refuse, StreamLost
from fsl_async.roles.split.effects import AdmitSplit
from fsl_async.roles.split.server_state import SplitClients
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.facts import RoundFact, RunFacts, VersionFact


class Told:
    """Drives a server's machine by a driver, and collects its facts."""

    def __init__(self, driver):
        self.driver, self.facts = driver, []
        self.handle, self.book = driver.machine.handle, RunFacts(driver.machine)
        driver.machine.handle = self.follow

    def follow(self, event, now):
        """Handle an event, and keep its facts."""
        effects = self.handle(event, now)
        self.facts += self.book.after(event, effects)
        return effects

    def __getattr__(self, name):
        return getattr(self.driver, name)


@pytest.fixture
def told(make_server):
    """Make a driven server machine whose facts are collected; the arguments are its rules."""
    return lambda **rules: Told(make_server(**rules))


def newest(driver, kind):
    return [one for one in driver.facts if isinstance(one, kind)][-1]


def test_a_round_from_the_call_to_the_version(told):
    """Each state once: who is waited for, when the window closes, and who is in the version."""
    server = told(quorum=0.3)
    server.begin("a", "b", "c", "d")
    ready = newest(server, RoundFact)
    assert (ready.phase, ready.next_at, ready.is_open) == ("ready", 600.0, False)
    server.fire()
    called = newest(server, RoundFact)
    assert (called.phase, called.number, called.called, called.answered) == ("collecting", 0, 4, 0)
    assert (called.called_at, called.quorum_at, called.next_at) == (600.0, None, None)
    server.store(key("a"), after_s=5.0)
    one = newest(server, RoundFact)
    assert (one.answered, one.pending, one.waited_for) == (1, 1, ("b", "c", "d"))
    server.receive(msg.Skip(0, "nothing trained"), "d")
    server.feed(ClientLeft("c", 1, "expired"))
    count = len(server.facts)
    server.feed(ev.HeartbeatReceived("a", {"step": 3}))
    assert len(server.facts) == count, "nothing has changed"
    window = newest(server, RoundFact)
    assert (window.quorum_at, window.closes_at, window.waiting) == (605.0, 665.0, 1)
    server.fire()
    assert newest(server, RoundFact).phase == "merging"
    server.committed(1)
    made = newest(server, VersionFact)
    assert (made.version, made.tokens, made.gained, made.deltas) == (1, 8, 8, {"a": 1})
    assert (made.called, made.answered, made.alive, made.asked, made.in_time) == (4, 1, 3, 4, 1)
    assert (made.late, made.nothing, made.left) == (("b",), ("d",), ("c",))
    assert (made.needed, made.staleness_mean, made.staleness_max) == (1, 0.0, 0)
    after = newest(server, RoundFact)
    assert (after.phase, after.late, after.pending, after.next_at) == ("ready", ("b",), 0, 1200.0)
    server.store(key("b"), number=0)
    assert newest(server, RoundFact).late == (), "its answer came"
    server.fire()
    server.store(key("a", 2, 1))
    server.fire()
    server.committed(2)
    made = newest(server, VersionFact)
    assert (made.in_time, made.earlier, made.earlier_of) == (1, 1, ("b",))
    assert (made.staleness_mean, made.staleness_max) == (0.5, 1)


def test_a_merge_that_fails_is_no_version(told):
    """A full disk does not show as progress; the try that succeeds has all."""
    server = told()
    server.begin("a")
    server.fire()
    server.store(key("a"))
    server.feed(Done(do.Commit(1, (), 1.0), "full"))
    assert newest(server, VersionFact).version == 0
    assert newest(server, RoundFact).pending == 1
    server.fire()
    server.committed(1)
    assert newest(server, VersionFact).deltas == {"a": 1}


def test_a_start_states_what_is_on_disk(told):
    """Also of the deltas that a later version merges, how many were stored before."""
    server = told()
    pending, held = stored_of(key("a")), stored_of(key("b"))
    server.recover(0, "d0", pending=(pending,), held=(held,), tokens_total=70)
    found = newest(server, VersionFact)
    assert (found.made_of, found.version, found.tokens) == ("disk", 0, 70)
    assert found.held == (key("b").text,)
    assert newest(server, RoundFact).pending == 1
    server.join("a", 2)
    server.fire()
    server.store(key("a", 2, 0, 2))
    server.committed(1)
    made = newest(server, VersionFact)
    assert (made.before, made.deltas) == (1, {"a": 2})


def test_clients_that_send_by_themselves_are_not_called(told):
    """Their round is open all the time, and nothing waits for a client."""
    server = told(trigger="buffer", buffer=2)
    server.begin("a", "b")
    server.fire()
    assert newest(server, RoundFact).phase == "ready"
    for name in "ab":
        server.store(key(name), number=-1)
    now = newest(server, RoundFact)
    assert (now.phase, now.is_open, now.called) == ("merging", False, 0)
    server.committed(1)
    made = newest(server, VersionFact)
    assert (made.asked, made.called, made.deltas) == (0, 0, {"a": 1, "b": 1})
    assert (made.needed, made.earlier) == (0, 2)


def test_what_a_client_does_and_what_became_of_its_deltas(told):
    """A state once, and only of the process that has the session."""
    server = told(guard=guard_of(clip_median=0))
    server.hello("a")
    server.attach("a")
    server.feed(ClientLeft("a", 9, "expired"))
    server.committed(0)
    server.receive(msg.Fetch(-1, ""), "a")
    server.hold("a", 0)
    server.hold("a", 0)
    server.offer(key("a"))
    server.feed(StreamLost("a", f"delta:{key('a').text}", "broken"))
    server.store(key("a"))
    server.store(key("a", 2), problem="not finite")
    server.feed(ClientLeft("a", 1, "bye", "done"))
    server.feed(ClientLeft("a", 1, "bye", "done"))
    clients = [one for one in server.facts if isinstance(one, ClientFact)]
    assert [one.state for one in clients if not one.outcome] == [
        "joining", "publishing", "fetching", "training", "sending", "training", "gone",
    ]  # fmt: skip
    assert [(one.begins, one.version) for one in clients[:4]] == [
        (True, -1), (False, -1), (False, -1), (False, 0),
    ]  # fmt: skip
    outcomes = [(one.key, one.outcome) for one in clients if one.outcome]
    assert outcomes == [(key("a").text, "accepted"), (key("a", 2).text, "quarantined")]
    assert (clients[-1].why, clients[-1].goodbye) == ("bye", "done")


def test_clients_that_cannot_take_part_are_refused(told):
    """With the sentence that they get; of another model the note says why."""
    server = told(shards=1)
    server.begin("a")
    server.hello("b")
    server.feed(ClientLeft("a", 1, "expired"))
    server.hello("a", 2, run="run-1")
    server.attach("a", difference="w: 3 values")
    *_, full, gone, again, other = [one for one in server.facts if isinstance(one, ClientFact)]
    assert (full.peer, full.state) == ("b", "refused")
    assert full.why.startswith("all 1 data shards are taken")
    assert (gone.state, again.in_run, again.incarnation) == ("gone", True, 2)
    assert (other.peer, other.state, other.why) == ("a", "refused", "")


def test_clients_of_a_split_server():
    """They train at once."""
    clients = SplitClients()
    admitted = AdmitSplit("a", 3, None)
    (begun,) = clients.after(Greeted("a", None, 3), [admitted])
    assert (begun.state, begun.begins, begun.incarnation) == ("training", True, 3)
    assert clients.after(ClientLeft("a", 2, "expired"), []) == []
    (gone,) = clients.after(ClientLeft("a", 3, "expired"), [])
    assert (gone.state, gone.why) == ("gone", "expired")
    (refused,) = clients.after(ClientLeft("b", 1, "x"), [Refuse("b", "full", "no room")])
    assert (refused.peer, refused.why) == ("b", "no room")

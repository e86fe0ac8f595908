"""The triggers rounds, turns, sequential, and the quorum of `clock`; test_ps_run has the rest."""

import pytest
from deltas import key, stored_of

from fsl_async.config.settings import SyncConfig
from fsl_async.roles.machine import ClientLeft, DrainAsked, Finish, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.ps import Phase
from fsl_async.roles.sync.ps_state import ArrivalHistory, Round
from fsl_async.roles.sync.triggers import QuorumAndGrace


def called(effects):
    """The clients that were sent a Turn, and its round, in order."""
    return [
        (effect.peer, effect.message.round)
        for effect in effects
        if isinstance(effect, Send)
        and isinstance(effect.message, msg.Call)
        and effect.message.trains
    ]


@pytest.fixture
def run(make_server):
    """Make a parameter server whose first round needs `len(names)` clients, and let them join."""

    def make(trigger, *names, **rules):
        rules = {"min_clients": len(names), "round_cap_s": 100.0, **rules}
        return make_server(trigger=trigger, **rules).begin(*names)

    return make


@pytest.mark.parametrize(
    ("trigger", "at_first", "after_a"),
    [
        ("rounds", [("b", 0), ("a", 0)], []),
        ("turns", [("b", 0)], [("a", 0)]),
        ("sequential", [("b", 0)], None),
    ],
)
def test_the_order_of_calls(run, look, trigger, at_first, after_a):
    """All at once, one after another in shard order, or one per version."""
    server = run(trigger, "b", "a")
    assert called(server.fire()) == at_first
    assert server.now == 0.0, "as soon as there is a version"
    effects = server.store(key("b"))
    if after_a is None:
        assert look.only(effects, do.Commit)
        effects = server.committed(1)
        assert look.sent(effects) == [], "it is announced to the next one only"
        effects = server.fire()
        assert look.sent(effects, "a") == [msg.Announce(1, "d1"), msg.Turn(1)]
        return
    assert called(effects) == after_a
    effects = server.store(key("a"))
    assert "2 of 2 called clients sent a delta" in look.notes(effects)
    assert len(look.only(effects, do.Commit)[0].merged) == 2
    assert look.sent(server.committed(1)) == [msg.Announce(1, "d1")] * 2
    assert called(server.fire()) == [(name, 1) for name, _ in at_first]


@pytest.mark.parametrize("trigger", ["rounds", "turns", "sequential"])
def test_the_first_round_waits_for_enough(run, look, trigger):
    """It begins when the missing client holds the version, not at a fixed time."""
    server = run(trigger, "a", min_clients=2)
    effects = server.fire()
    assert "no round: 1 client is here, 2 are needed" in look.notes(effects)
    assert server.machine.next_deadline() is None
    server.hello("b")
    server.attach("b")
    assert server.machine.next_deadline() is None
    server.hold("b", 0)
    assert called(server.fire())


def test_the_same_incarnation_is_called_again(run, look):
    """The call may be lost with its session."""
    server = run("turns", "a", "b")
    server.fire()
    server.left("a")
    server.hello("a")
    assert look.sent(server.attach("a"))[-1] == msg.Turn(0)


@pytest.mark.parametrize("trigger", ["rounds", "turns", "sequential"])
def test_a_client_that_hangs(run, look, trigger):
    """The cap ends the wait for it if there is a delta, or gives the next client its turn."""
    server = run(trigger, "a", "b")
    server.fire()
    if trigger == "rounds":
        assert "stays open: 0 of 2 called clients sent a delta" in look.notes(server.fire())
        effects = server.store(key("b"), after_s=7.0)
        assert "1 of 2 called clients sent a delta, none from a in time" in look.notes(effects)
        assert look.only(effects, do.Commit)
        return
    effects = server.fire()
    assert server.now == 100.0
    assert "goes on: 0 of" in look.notes(effects)
    if trigger == "turns":
        assert called(effects) == [("b", 0)]
        assert server.machine.next_deadline() == 200.0
        effects = server.fire()
    assert "closes without a new version" in look.notes(effects)
    assert called(server.fire()) == [("a" if trigger == "turns" else "b", 0)]
    assert server.now == (201.0 if trigger == "turns" else 101.0), "not in a tight loop"


def test_turns_pass_over_lost_clients(run):
    """The order is fixed when the round opens; clients that left later are skipped."""
    server = run("turns", "a", "b", "c")
    server.fire()
    server.left("b")
    assert called(server.store(key("a"))) == [("c", 0)]
    server.left("c")
    assert server.machine.phase is Phase.MERGING
    server.committed(1)
    server.join("b", 2)
    server.fire()
    server.left("b", 2)
    server.store(key("a", 2, 1))
    assert server.machine.phase is Phase.MERGING, "there is no next one"
    server.committed(2)
    server.join("b", 3)
    server.fire()
    server.left("a")
    assert server.machine.phase is Phase.COLLECTING
    server.left("b", 3)
    assert server.machine.phase is Phase.READY, "no client is left, and there is no delta"


def recover(make_server, trigger, pending=(), settled=(), version=1):
    server = make_server(trigger=trigger)
    digests = {version: f"d{version}"}
    waiting = tuple(stored_of(each) for each in pending)
    merged = dict.fromkeys(settled, "merged")
    server.recover(version, f"d{version}", digests=digests, pending=waiting, settled=merged)
    for name in "abc":
        server.hello(name, 5)
        server.attach(name)
        server.hold(name, version)
    return server


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [("rounds", [("a", 1), ("c", 1)]), ("turns", [("a", 1)]), ("sequential", [])],
)
def test_after_a_restart_no_client_trains_a_round_twice(make_server, look, trigger, expected):
    """Clients get time to reconnect; one with a durable delta is not called."""
    server = recover(make_server, trigger, pending=[key("b", 1, 1, 4)])
    effects = server.fire()
    assert server.now == 10.0
    assert called(effects) == expected
    if trigger == "sequential":
        assert len(look.only(effects, do.Commit)) == 1
        server.committed(2)
        assert called(server.fire()) == [("a", 2)], "it starts from the first"
    else:
        assert server.machine.round.contributors() == 1


def test_sequential_continues_after_a_restart(make_server):
    """The next client follows that of the newest version."""
    server = recover(make_server, "sequential", settled=[key("c", 1, -1), key("a", 1, 0)])
    assert called(server.fire()) == [("b", 1)]


def test_sequential_repeats_the_order(run):
    """In shard order, then from the first again; a client that leaves changes no other turn."""
    server = run("sequential", "a", "b", "c")
    order = []
    for version in range(5):
        ((name, number),) = called(server.fire())
        assert number == version
        order.append(name)
        if version == 1:
            server.left("b")
            assert called(server.fire()) == [("c", 1)]
            server.join("b", 2)
            order.append("c")
            name = "c"
        incarnation = server.machine.members[name].incarnation
        server.store(key(name, version + 1, version, incarnation))
        server.committed(version + 1)
        server.hold(name, version + 1)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_delta_of_a_turn_that_is_over_is_refused(run, look):
    """Meanwhile another client trains those weights."""
    server = run("sequential", "a", "b")
    server.fire()
    server.fire()
    server.fire()
    effects = server.offer(key("a"))
    assert look.sent(effects)[0].code == "turn"
    assert look.only(server.offer(key("b")), do.ReceiveDelta)
    server.left("b")
    assert look.sent(server.offer(key("a")))[0].code == "turn", "also between two rounds"


def test_full_versions_by_sequential(run):
    """A client does not need the versions between its turns."""
    server = run("sequential", "a")
    for version in range(3):
        server.fire()
        server.store(key("a", version + 1, version))
        server.committed(version + 1)
    assert server.receive(msg.Fetch(2, "d2"), "a") == [do.SendVersion("a", "update", 3)]
    assert server.receive(msg.Fetch(1, "d1"), "a") == [do.SendVersion("a", "full", 3)]


@pytest.mark.parametrize("when", ["collecting", "ready", "merging"])
@pytest.mark.parametrize("trigger", ["rounds", "turns", "sequential"])
def test_asked_to_end(run, look, trigger, when):
    """The open round is the last: no client trains between rounds, so none follows."""
    server = run(trigger, "a", "b")
    if when == "ready":
        effects = server.feed(DrainAsked("Ctrl-C"))
        assert look.sent(effects)[-1] == msg.Stop("Ctrl-C")
        assert server.machine.ended
        return
    server.fire()
    if when == "merging":
        server.store(key("a"))
        if trigger != "sequential":
            server.store(key("b"))
    effects = server.feed(DrainAsked("Ctrl-C"))
    assert "no further round" in look.notes(effects)
    if when == "collecting":
        assert called(server.store(key("a"))) == [], "clients that had no turn get none"
        if server.machine.phase is Phase.COLLECTING:
            server.fire()  # b is not waited for any longer
    assert server.machine.phase is Phase.MERGING
    server.committed(1)
    server.hold("a", 1)
    server.hold("b", 1)
    assert server.machine.ended


def test_a_limit_of_tokens_needs_no_further_round(run, look):
    """It ends like a drain."""
    server = run("rounds", "a", tokens=8)
    server.fire()
    server.store(key("a"))
    server.committed(1)
    assert look.only(server.hold("a", 1), Finish)


def test_a_restart_after_the_last_round(make_server, look):
    """Killed between its last version and its end, it serves the version and calls no round."""
    server = make_server(trigger="rounds", tokens=5)
    server.recover(1, "d1", digests={1: "d1"}, tokens_total=9)
    server.hello("a")
    server.attach("a")
    server.hold("a", 1)
    assert look.only(server.fire(), Finish)


def served(effects):
    """Peers and versions of streams and announcements, in order."""
    return [
        (
            effect.peer,
            effect.version if isinstance(effect, do.SendVersion) else effect.message.version,
        )
        for effect in effects
        if isinstance(effect, do.SendVersion)
        or (isinstance(effect, Send) and isinstance(effect.message, msg.Announce))
    ]


def test_a_version_is_sent_with_its_announcement_once(run):
    """It saves a round trip; the Fetch that crosses it gets no second answer."""
    server = run("rounds", "a", "b", "late")
    server.fire()
    for name in ("a", "b", "late"):
        server.store(DeltaKey(name, 1, 0, 1))
    server.committed(1)
    server.hold("a", 1)
    server.hold("b", 1)  # and late does not
    for name in ("a", "b"):
        server.store(DeltaKey(name, 1, 1, 2))
    server.feed(ClientLeft("late", 1, "expired"))
    server.hello("late")
    server.attach("late")
    assert served(server.committed(2)) == [("a", 2), ("a", 2), ("b", 2), ("b", 2), ("late", 2)]
    assert server.receive(msg.Fetch(1, "d1"), "a") == [], "it was pushed"
    again = [do.SendVersion("a", "update", 2)]
    assert server.receive(msg.Fetch(1, "d1"), "a") == again, "a second Fetch is answered"
    assert server.receive(msg.Fetch(-1, ""), "late") == [do.SendVersion("late", "full", 2)]
    assert server.receive(msg.Fetch(1, "alien"), "b") == [do.SendVersion("b", "full", 2)]


@pytest.mark.parametrize("how", ["declined", "held", "new session"])
def test_a_fetch_after_a_failed_push_is_answered(run, how):
    """A pushed version may be declined or lost: then the client's Fetch is answered."""
    server = run("rounds", "a")
    server.fire()
    server.store(DeltaKey("a", 1, 0, 1))
    server.committed(1)
    if how == "declined":
        server.feed(ev.VersionSent("a", "update", 1, 0, is_lost=True))
    elif how == "held":
        server.hold("a", 1, "other")  # is answered with the full version
        server.hold("a", 1)
    else:
        server.hello("a")
        server.attach("a")
    assert server.receive(msg.Fetch(0, "d0"), "a") == [do.SendVersion("a", "update", 1)]


RULES = SyncConfig(quorum=0.5)


def open_round(*names, cap_s=100.0):
    return Round(3, 1000.0, cap_s, dict.fromkeys(names, 1))


def decide(open_, now, pending=1, history=None):
    return QuorumAndGrace(RULES).verdict(open_, history or ArrivalHistory(), now, pending=pending)


@pytest.mark.parametrize(("quorum", "needed"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_quorum_rounds_up_and_is_at_least_one(quorum, needed):
    """Half of four is two, and zero is never enough."""
    open_ = open_round("a", "b", "c", "d")
    rules = SyncConfig(quorum=quorum or 1e-9)
    verdict = QuorumAndGrace(rules).verdict(open_, ArrivalHistory(), 1001.0, pending=0)
    assert verdict.reason.endswith(f"0 of 4 called clients sent a delta, {needed} needed")

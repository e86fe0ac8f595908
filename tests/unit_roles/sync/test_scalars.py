"""Versions of zeroth order: scalars of all missed versions go with the announcement."""

import pytest

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.roles.machine import DeclineStream, Done, Send, TimerFired
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.progress import RunPosition

HISTORY = 5
ZEROTH = TuneConfig(method="zeroth", zo_history=HISTORY)


@pytest.fixture
def server(make_server):
    """A run of zeroth order with the clients a and b at version 0."""
    made = make_server(trigger="rounds", tune=ZEROTH, min_clients=2, max_staleness=0)
    return made.begin("a", "b")


def advance(server, names=("a", "b"), *, holds=True):
    """A round of these clients, which then hold the version; returns the commit's effects."""
    base = server.machine.version
    if server.machine.next_deadline() is not None and not base:
        server.fire()
    for name in names:
        server.store(DeltaKey(name, 1, base, base + 1))
    effects = server.committed(base + 1)
    for name in names if holds else ():
        server.hold(name, base + 1)
    return effects


def sent(effects):
    found = [one for one in effects if isinstance(one, do.SendVersion)]
    return [(one.peer, one.kind, one.since, one.version) for one in found]


def announced(effects):
    return [
        one.peer
        for one in effects
        if isinstance(one, Send) and isinstance(one.message, msg.Announce)
    ]


def test_a_version_goes_with_its_announcement(server):
    effects = advance(server, holds=False)
    assert sent(effects) == [("a", "seeds", 0, 1), ("b", "seeds", 0, 1)]
    assert announced(effects) == []
    found = next(one for one in effects if isinstance(one, do.SendVersion))
    assert found.digest == "d1"
    again = sent(server.receive(msg.Fetch(0, "d0"), "a"))
    assert again == [("a", "seeds", 0, 1)], "it could not use what was sent"


def test_a_client_too_far_behind_gets_the_version_in_full(server):
    for _ in range(HISTORY + 1):
        advance(server)
    assert sent(server.receive(msg.Fetch(0, "d0"), "b")) == [("b", "full", -1, 6)]
    assert sent(server.receive(msg.Fetch(1, "d1"), "b")) == [("b", "seeds", 1, 6)]
    assert sent(server.receive(msg.Fetch(-1, ""), "b")) == [("b", "full", -1, 6)]
    assert sent(server.receive(msg.Fetch(1, "alien"), "b")) == [("b", "full", -1, 6)]


def test_a_client_that_fetches_a_version_in_full_waits_for_nothing_else(server):
    """Scalars would end its fetch, and a round would wait for it."""
    for _ in range(HISTORY + 1):
        advance(server)
    server.receive(msg.Fetch(0, "d0"), "b")
    server.fire()
    server.store(DeltaKey("b", 1, 6, 7))  # of the round that is open
    effects = [*server.store(DeltaKey("a", 1, 6, 7)), *server.committed(7)]
    assert sent(effects) == [("a", "seeds", 6, 7)]
    assert "b" in announced(effects)
    called = [one.peer for one in server.fire() if isinstance(one, Send)]
    assert called == ["a"]
    server.hold("b", 6)
    assert sent(server.receive(msg.Fetch(6, "d6"), "b")) == [("b", "seeds", 6, 7)]


def test_no_version_is_made_of_late_deltas_alone(make_server):
    """Their directions are not those of the round: it waits for a delta of its own."""
    server = make_server(
        trigger="rounds", tune=ZEROTH, max_staleness=0, min_clients=2, round_cap_s=100.0
    ).begin("a", "b")
    server.fire()
    server.store(DeltaKey("a", 1, 0, 1))
    at_cap = server.feed(TimerFired(), after_s=101.0)
    assert any(isinstance(one, do.Commit) for one in at_cap)
    server.store(DeltaKey("b", 1, 0, 1), number=0)  # while the version is made
    server.committed(1)
    server.fire()
    assert server.machine.deltas.mergeable == 0 < len(server.machine.deltas.pending)
    at_cap = server.feed(TimerFired(), after_s=101.0)
    assert not any(isinstance(one, do.Commit) for one in at_cap)
    made = server.store(DeltaKey("a", 1, 1, 2))
    merged = next(one.merged for one in made if isinstance(one, do.Commit))
    assert [(one.key.client, one.staleness) for one in merged] == [("b", 1), ("a", 0)]


def test_a_position_is_sent_when_it_has_moved(make_server):
    server = make_server(trigger="rounds", tune=ZEROTH, max_staleness=0, rounds=100)
    server.begin("a")
    positions = []
    for _ in range(6):
        effects = advance(server, ("a",))
        positions += [one.position for one in effects if isinstance(one, do.SendVersion)]
    told = [one != RunPosition() for one in positions]
    assert told[0]
    assert 2 <= sum(told) <= 4, "one percent a round, and two are told"


# --- a client ---


@pytest.fixture
def trained(client):
    """A client that has measured round 0."""
    client.ready()
    client.receive(msg.Turn(0))
    measure(client, 0, 1)
    return client


def measure(client, base, sequence, tokens=5):
    return client.feed(ev.Snapshotted(sequence, base, tokens, 1, {}, {"order": 0.0}))


def receive(client, version):
    """The version comes with its announcement, and is applied; returns the last effects."""
    client.receive(msg.Scalars(version, f"d{version}", b""))
    client.feed(Done(do.ReceiveVersion("", "seeds", version)))
    client.feed(Done(do.FinishEncoding(1)))
    client.replaced(version)
    return client.rebased(version)


def test_the_version_that_comes_is_not_asked_for(trained, look):
    trained.receive(msg.Turn(1))
    received = trained.receive(msg.Scalars(1, "d1", b""))
    assert received == [do.ReceiveVersion("seeds:1", "seeds", 1)]


def test_a_round_that_begins_at_once_reports_the_version_that_is_held(trained, look):
    trained.acknowledge(trained.key(1))
    trained.receive(msg.Turn(1))
    effects = receive(trained, 1)
    assert look.sent(effects) == []
    assert do.TakeSnapshot(2, True, 1) in effects
    skipped = measure(trained, 1, 2, tokens=0)
    assert msg.Holding(1, "d1") in look.sent(skipped), "there is no delta to report it"


def test_scalars_that_come_during_a_replay_are_asked_for_after_it(trained, look):
    """The worker replays a frame from the base as it is: nothing may take its place."""
    trained.acknowledge(trained.key(1))
    for version in (1, 2):
        taken = trained.receive(msg.Scalars(version, f"d{version}", b""))
        assert isinstance(taken[0], do.ReceiveVersion if version == 1 else DeclineStream)
    full = trained.receive(msg.VersionMeta("full", 2), stream="full:2")
    assert isinstance(full[0], DeclineStream)
    assert trained.feed(Done(do.ReceiveVersion("", "seeds", 1))) == [do.ReplaceBase(1)]
    trained.replaced(1)
    assert msg.Fetch(1, "d1") in look.sent(trained.rebased(1)), "at once"

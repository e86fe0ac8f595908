"""A client that is called to train rounds: once, from their version, and held at their end."""

from fsl_async.roles.machine import DrainAsked
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientRules


def turn(client, number, *, last=False):
    return client.feed(ev.TurnCalled(number, last))


def test_a_round_from_beginning_to_end(client):
    """It is trained, sent, and held until its version is applied; then the next one begins."""
    client.ready()
    assert turn(client, 0) == [do.BeginRound(1, 0)]
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1)]
    client.announce(1)
    assert turn(client, 1) == [], "it starts from a version that has not arrived yet"
    client.offered(1)
    client.fetched(1)
    client.replaced(1)
    effects = client.rebased(1)
    assert do.ResumeTraining() in effects
    assert effects[-1] == do.BeginRound(2, 1)


def test_a_turn_for_a_round_that_is_over(client):
    """The parameter server has gone on without this client."""
    client.ready()
    turn(client, 0)
    client.announce(1)
    client.snapshot(1, 0)
    turn(client, 0)
    client.offered(1)
    client.fetched(1)
    client.feed(ev.EncodingFinished(1))
    client.replaced(1)
    assert do.BeginRound(2, 0) not in client.rebased(1)
    assert not any(isinstance(e, do.BeginRound) for e in client.acknowledge(client.key(1)))
    client.call(1)
    assert client.machine.answering.round == 1, "and the old turn stays forgotten"


def test_an_outdated_turn_is_dropped(client):
    """A newer version arrived before the turn could begin."""
    client.ready(version=3)
    assert turn(client, 2) == []
    assert client.machine.call is None


def test_a_turn_is_repeated_in_a_new_session(client):
    """The round is trained once, stays held offline, and stays the last one."""
    client.ready()
    turn(client, 0)
    client.lose()
    client.welcome()
    client.announce(0)
    assert turn(client, 0, last=True) == []
    assert client.machine.answering.last
    client.snapshot(1, 0)
    assert not any(isinstance(effect, do.ResumeTraining) for effect in client.lose())
    assert any(isinstance(effect, do.OfferDelta) for effect in client.welcome())
    assert turn(client, 0, last=True) == [], "its delta is the answer"


def test_a_round_that_ends_offline_is_held_too(client):
    """There is nothing to train before the next turn."""
    client.ready()
    turn(client, 0)
    client.lose()
    assert client.snapshot(1, 0) == []
    assert client.machine.held is not None


def test_nothing_was_trained_or_the_delta_is_refused(client, look):
    """There is no resulting version to wait for."""
    client.ready()
    turn(client, 0)
    effects = client.snapshot(1, 0, tokens=0)
    assert look.sent(effects)[0].round == 0
    assert do.ResumeTraining() in effects
    turn(client, 0)
    client.snapshot(2, 0)
    assert do.ResumeTraining() in client.refuse(client.key(2), "turn")
    assert turn(client, 0) == [do.BeginRound(3, 0)], (
        "called again for the same round, it is trained again"
    )


def test_the_end_is_asked_for_in_a_round(client):
    """At Ctrl-C the progress is sent, and the thread is not held."""
    client.ready()
    turn(client, 0)
    client.feed(DrainAsked("Ctrl-C"))
    assert do.ResumeTraining() in client.snapshot(1, 0)


def test_the_wire():
    """A turn is not a call: a client of an older release must refuse it."""
    assert msg.from_wire({"m": "turn/1", "round": 3, "last": False}) == msg.Turn(3)
    assert ev.TurnCalled(3) != ev.RoundCalled(3)
    assert not ev.RoundCalled(3).is_turn


def test_what_the_node_reads_and_sets(client):
    """A version is announced before it is held; the run's times come with the welcome."""
    client.machine.rules = ClientRules(drain_s=3.0)
    client.ready()
    client.announce(1)
    assert (client.machine.latest.version, client.machine.base.version) == (1, 0)
    client.feed(DrainAsked("Ctrl-C"))
    assert client.machine.next_deadline() == 3.0

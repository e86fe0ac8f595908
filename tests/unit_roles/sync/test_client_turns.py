"""A client that is called to train rounds: from the version they start from, once, and held at their end."""

from fsl_async.roles.machine import DrainAsked
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientRules


def turn(client, number, *, last=False):
    return client.feed(ev.TurnCalled(number, last))


def test_a_round_from_beginning_to_end(client):
    """Trained, sent, and held until what comes of it is here; then the next one."""
    client.ready()
    assert turn(client, 0) == [do.BeginRound(1, 0)]
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1)]
    client.announce(1)
    assert turn(client, 1) == [], "it starts from the version that is not here yet"
    client.offered(1)
    client.fetched(1)
    client.replaced(1)
    effects = client.rebased(1)
    assert do.ResumeTraining() in effects
    assert effects[-1] == do.BeginRound(2, 1)


def test_a_turn_for_a_round_that_is_over(client):
    """The server has gone on without this client."""
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
    assert client.machine.answering.round == 1, "and the old turn does not come back"


def test_an_outdated_turn_is_dropped(client):
    """It came, and then a newer version before it could begin."""
    client.ready(version=3)
    assert turn(client, 2) == []
    assert client.machine.call is None


def test_a_turn_is_said_again_in_a_new_session(client):
    """The round goes on being trained, once; it stays held without a server; that it is the last one is not forgotten."""
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


def test_a_round_that_ends_without_a_server_is_held_too(client):
    """There is nothing to train before the next turn."""
    client.ready()
    turn(client, 0)
    client.lose()
    assert client.snapshot(1, 0) == []
    assert client.machine.held is not None


def test_nothing_was_trained_or_the_delta_is_refused(client, look):
    """Then nothing comes of it that could be waited for."""
    client.ready()
    turn(client, 0)
    effects = client.snapshot(1, 0, tokens=0)
    assert look.said(effects)[0].round == 0
    assert do.ResumeTraining() in effects
    turn(client, 0)
    client.snapshot(2, 0)
    assert do.ResumeTraining() in client.refuse(client.key(2), "turn")
    assert turn(client, 0) == [do.BeginRound(3, 0)], (
        "called again for the same round, it is trained again"
    )


def test_the_end_comes_in_a_round(client):
    """Ctrl-C: what is trained by then is sent, and the thread is not held."""
    client.ready()
    turn(client, 0)
    client.feed(DrainAsked("Ctrl-C"))
    assert do.ResumeTraining() in client.snapshot(1, 0)


def test_the_wire():
    """A turn is not a call: a client that does not know it must not train a single step for it."""
    assert msg.from_wire({"m": "turn/1", "round": 3, "last": False}) == msg.Turn(3)
    assert ev.TurnCalled(3) != ev.RoundCalled(3)
    assert not ev.RoundCalled(3).is_turn


def test_what_the_node_asks_and_sets(client):
    """A round's version may be announced long before it is here; the run's times come with the welcome."""
    client.machine.rules = ClientRules(drain_s=3.0)
    client.ready()
    client.announce(1)
    assert (client.machine.latest.version, client.machine.base.version) == (1, 0)
    client.feed(DrainAsked("Ctrl-C"))
    assert client.machine.next_deadline() == 3.0

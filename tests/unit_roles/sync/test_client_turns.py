"""A client that is called to train rounds: once, from their version, and held at their end."""

from fsl_async.roles.machine import DrainAsked
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg


def turn(client, number, *, last=False):
    return client.receive(msg.Turn(number, last))


def test_a_round_from_beginning_to_end(client):
    """It is trained, sent, and held until its version is applied; then the next one begins."""
    client.ready()
    assert turn(client, 0) == [do.TakeSnapshot(1, True, 0)]
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1)]
    client.announce(1)
    assert turn(client, 1) == [], "it starts from a version that has not arrived yet"
    client.offered(1)
    client.fetched(1)
    client.replaced(1)
    effects = client.rebased(1)
    assert do.ResumeTraining() in effects
    assert effects[-1] == do.TakeSnapshot(2, True, 1)


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


def test_the_end_is_asked_for_in_a_round(client):
    """At Ctrl-C the progress is sent, and the thread is not held."""
    client.ready()
    turn(client, 0)
    client.feed(DrainAsked("Ctrl-C"))
    assert do.ResumeTraining() in client.snapshot(1, 0)

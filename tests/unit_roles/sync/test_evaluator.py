"""The evaluator's own machine: what it takes, when it scores, and that it trains nothing."""

import pytest
from deltas import delta_of, key

from fsl_async.roles.machine import SERVER, DeclineStream, Done, StreamLost
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.evaluator import EvaluatorMachine

A, B = key("a"), key("b")
QUESTION = msg.Evaluate(0, [[A.text, 0.5], [B.text, 0.5]])


@pytest.fixture
def judge(client):
    client.machine = EvaluatorMachine("judge", 1)
    return client.ready()


def offer(judge, which, stream=""):
    return judge.receive(
        msg.DeltaMeta(delta_of(which)), stream=stream or msg.delta_stream(which.text)
    )


def arrive(judge, which):
    """Have a delta offered and received; returns the effects of its last chunk."""
    (receive,) = offer(judge, which)
    assert isinstance(receive, do.ReceiveDelta)
    return judge.feed(Done(receive))


def test_a_question_is_answered_once_all_deltas_are_here(judge, look):
    """A score goes out for each."""
    assert judge.receive(QUESTION) == []
    assert arrive(judge, A) == []
    assert arrive(judge, B) == [do.ScoreDeltas(0, {A: 0.5, B: 0.5})]
    effects = judge.feed(ev.Scored(0, {A: (1.0, 0.5, 0.25), B: (1.0, 0.0, 0.0)}))
    assert look.sent(effects) == [msg.Score(0, A, 1.0, 0.5, 0.25), msg.Score(0, B, 1.0, 0.0)]


def test_a_delta_whose_stream_breaks_is_left_out(judge):
    """The others are scored without it."""
    judge.receive(QUESTION)
    arrive(judge, A)
    lost = StreamLost(SERVER, msg.delta_stream(B.text), "reset")
    assert judge.feed(lost) == [do.ScoreDeltas(0, {A: 0.5})]
    assert judge.feed(lost) == []


@pytest.mark.parametrize("stream", ["delta:", "delta:a/1", "delta:z/1/0/1", "delta:\u2026"])
def test_a_stream_of_any_name_may_break(judge, stream):
    """Its name is the parameter server's choice where it is no delta's that was asked about."""
    judge.receive(QUESTION)
    assert judge.feed(StreamLost(SERVER, stream, "wrong number of chunks")) == []
    arrive(judge, A)
    assert arrive(judge, B) == [do.ScoreDeltas(0, {A: 0.5, B: 0.5})]


def test_one_question_is_scored_at_a_time(judge, look):
    """Its deltas are in memory until then, so another one waits; that one may be the same."""
    judge.receive(QUESTION)
    arrive(judge, A)
    arrive(judge, B)
    judge.receive(msg.Evaluate(0, [[B.text, 1.0]]))
    assert arrive(judge, B) == []
    effects = judge.feed(ev.Scored(0, {A: (1.0, 0.5, 0.25)}))
    assert look.sent(effects) == [msg.Score(0, A, 1.0, 0.5, 0.25)]
    assert look.only(effects, do.ScoreDeltas) == [do.ScoreDeltas(0, {B: 1.0})]


def test_deltas_wait_for_the_version_that_they_are_added_to(judge):
    """The question may come before the model is moved; one of an older version is dropped."""
    judge.receive(msg.Evaluate(1, [[A.text, 1.0]]))
    assert arrive(judge, A) == []
    judge.announce(1)
    assert do.ScoreDeltas(1, {A: 1.0}) in judge.follow(1)
    judge.receive(msg.Evaluate(0, [[B.text, 1.0]]))
    assert arrive(judge, B) == []


@pytest.mark.parametrize("stream", ["", "delta:b/1/0/9"])
def test_what_was_not_asked_about_is_declined(judge, stream):
    """A stream of another name, or of no question, takes no memory."""
    if stream:
        judge.receive(QUESTION)
    (effect,) = offer(judge, A, stream)
    assert isinstance(effect, DeclineStream)
    judge.receive(QUESTION)
    arrive(judge, A)
    (effect,) = offer(judge, A)
    assert isinstance(effect, DeclineStream), "twice"


def test_it_is_called_and_sends_nothing(judge):
    """No turn, pace or publication moves it; its end sends no last delta."""
    for message in (msg.Turn(0), msg.Call(0), msg.Publish(), msg.Pace(1, 1)):
        assert judge.receive(message) == []
    effects = judge.receive(msg.Stop("done"))
    assert not [one for one in effects if isinstance(one, do.TakeSnapshot | do.OfferDelta)]


def test_a_score_after_the_session_ended_is_not_sent(judge):
    """It would be lost; the parameter server asks again."""
    judge.receive(QUESTION)
    judge.lose()
    assert judge.feed(ev.Scored(0, {A: (1.0, 0.5, 0.25)})) == []

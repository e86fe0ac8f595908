"""What a parameter server says to a split server elsewhere, event by event."""

import pytest
from machines import Driver, of, told

from fsl_async.roles.machine import Finish, HelloRefused, Note, RunEnded, SendGoodbye, SessionLost
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.run_end_notifier import RunEndNotifierMachine
from fsl_async.roles.sync import events as base

WELCOME = ev.SplitWelcomed("run", 1)
OVER = msg.RunOver("limit")


@pytest.fixture
def herald():
    """One that has dialled."""
    return Driver(RunEndNotifierMachine("run", 5.0, 4.0))


def ended(effects):
    """Whether it is done."""
    return [type(each) for each in effects[-2:]] == [SendGoodbye, Finish]


def test_the_end_is_said_and_heard(herald):
    """In the session that is there; nothing before it."""
    assert herald.machine.hello() == msg.PsHello("run", msg.PS_ROLE)
    assert herald.feed(WELCOME) == []
    assert told(herald.feed(RunEnded("limit"))) == [OVER]
    assert herald.feed(RunEnded("limit")) == [], "once"
    assert ended(herald.feed(ev.SplitServerEnded("the run has ended")))
    assert herald.feed(WELCOME) == []


@pytest.mark.parametrize("lost", ["bye", "expired"])
def test_a_split_server_that_goes_when_it_has_heard(herald, lost):
    """Its answer is not waited for any longer."""
    herald.feed(WELCOME)
    herald.feed(RunEnded("limit"))
    assert ended(herald.feed(SessionLost(lost)))


def test_one_that_is_away_at_the_end_is_waited_for_a_moment(herald):
    """It may be being launched again; the parameter server does not stay for it."""
    assert herald.feed(RunEnded("limit")) == []
    assert herald.feed(SessionLost("reset")) == [], "there was no session"
    assert told(herald.feed(WELCOME)) == [OVER]
    assert ended(herald.fire())
    assert herald.machine.next_deadline() is None


def test_one_that_leaves_is_dialled_again(herald):
    """Another process goes on in its folder, at the same address."""
    herald.feed(WELCOME)
    assert herald.feed(SessionLost("bye")) == []
    assert herald.feed(HelloRefused("leaving", "x")) == []
    assert herald.fire() == [split.DialAgain()]
    herald.feed(HelloRefused("leaving", "x"))
    herald.feed(WELCOME)
    assert herald.machine.next_deadline() is None
    herald.feed(RunEnded("limit"))
    assert ended(herald.feed(HelloRefused("leaving", "x")))


def test_one_that_does_not_want_it(herald):
    """Somebody has to read it, once; the end does not wait for it."""
    effects = herald.feed(HelloRefused("run", "this split server is in run x"))
    assert [note.level for note in of(effects, Note)] == ["warning"]
    assert ended(herald.feed(RunEnded("limit")))


@pytest.mark.parametrize("code", ["full", "name", "key"])
def test_a_refusal_that_passes(herald, code):
    """A session ends there, or a person gives the name to this key: whoever had stopped dialling would not say the end."""
    notes = []
    for _ in range(3):
        notes += of(herald.feed(HelloRefused(code, "not now")), Note)
        assert herald.fire() == [split.DialAgain()]
    (note,) = notes
    assert note.text.endswith("not now; trying again")
    herald.feed(WELCOME)
    assert told(herald.feed(RunEnded("limit"))) == [OVER]


def test_one_that_has_ended_before(herald):
    """A client was faster."""
    assert herald.feed(HelloRefused("finished", "this run has ended")) == []
    assert ended(herald.feed(RunEnded("")))


def test_what_changes_no_decision(herald):
    """Whatever else may be fed to a machine."""
    assert herald.feed(base.HeartbeatReceived("a", {})) == []

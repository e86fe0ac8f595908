"""The ends of a parameter server that a split server in another process receives.

They are those of the run, and no others.
"""

import asyncio

import pytest

import fsl_transport as tp
from fsl_async.config.load import load
from fsl_async.errors import RunDirError
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.ps import run_end_notifier
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.process.stopper import Stopper
from fsl_async.roles.split import messages as msg


class Recording(RunEndNotifier):
    """A notifier without a split server that records the reasons."""

    reasons: tuple[str, ...] = ()

    def run_ended(self, reason):
        """Record the reason."""
        Recording.reasons += (reason,)
        super().run_ended(reason)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A function that serves until `end(stop)`, called once clients can connect, has its effect.

    Returns the recorded reasons.
    """
    monkeypatch.setattr(Recording, "reasons", ())

    def serve(end):
        stop = Stopper()
        chosen = ("listen.address=tcp://127.0.0.1:0",)
        (tmp_path / "run").mkdir()
        with node_ps.prepared(
            load(None, chosen),
            tmp_path / "run",
            node_ps.Options(announce=lambda _: end(stop), log=lambda _: None, stop=stop),
            notifier=lambda _, run, *__: Recording(run),
        ) as run:
            asyncio.run(asyncio.wait_for(run(load(None, chosen)), 60.0))

    return serve


@pytest.mark.parametrize("hard", [False, True])
def test_only_the_end_of_the_run_is_sent(served, hard):
    """Asked once, the parameter server stops its clients, and the run is over.

    At a hard end clients get no Stop, and go on with the next process. A split server that had
    ended would refuse them.
    """
    served(lambda stop: stop.request(hard=hard, reason="Ctrl-C"))
    assert Recording.reasons == (() if hard else ("Ctrl-C",))


def test_a_failure_is_not_sent(served, monkeypatch):
    """The run continues after another start."""
    shells = []
    start = ParameterServerShell.start
    monkeypatch.setattr(
        ParameterServerShell,
        "start",
        lambda shell, found: (shells.append(shell), start(shell, found)),
    )
    with pytest.raises(RunDirError, match="start it again"):
        served(lambda _: shells[0].context.jobs.failed("start it again"))
    assert Recording.reasons == ()


def test_without_an_end_there_is_no_wait(monkeypatch):
    """A failed parameter server must end quickly, because it is started again."""

    async def waited():
        await asyncio.wait_for(RunEndNotifier("run").wait(), 1.0)

    asyncio.run(waited())


class Session:
    """An endpoint that records calls; the test feeds events."""

    def __init__(self, take):
        self.take, self.dials, self.sent, self.left = take, 0, [], False

    def connect(self, hello):
        """Dial."""
        self.dials += 1
        assert msg.from_wire(hello()) == msg.PsHello("run", msg.PS_ROLE)

    def send(self, peer, body):
        """Record a message."""
        self.sent.append(msg.from_wire(body))

    def disconnect(self, peer="", reason=""):
        """Record the goodbye."""
        self.left = True


class Notified:
    """A notifier on a virtual clock, and its session."""

    def __init__(self):
        self.scheduler, self.notes = tp.VirtualScheduler(), []
        self.notifier = RunEndNotifier(
            "run",
            Session,
            redial_s=5.0,
            scheduler=self.scheduler,
            say=lambda note: self.notes.append(note.text),
        )
        self.session = self.notifier.endpoint

    def up(self):
        """Feed a welcome of the split server."""
        self.session.take(tp.PeerUp("", 1, msg.to_wire(msg.SplitWelcome("run", 0, "", -1))))

    def refused(self, code, text="x"):
        """Feed a refusal of the split server."""
        self.session.take(tp.Refused(code, text))

    @property
    def done(self):
        """Whether the wait is over."""
        return self.session.left and self.notifier._finished.is_set()


@pytest.fixture
def notified():
    """A notifier that has dialed once."""
    return Notified()


OVER = [msg.RunOver("limit")]


def test_the_end_is_sent_and_answered(notified):
    """It is sent once, in the current session, and nothing before it."""
    notified.up()
    assert notified.session.sent == []
    for _ in range(2):
        notified.notifier.run_ended("limit")
    assert notified.session.sent == OVER
    assert not notified.done
    notified.session.take(tp.MessageReceived("", msg.to_wire(msg.Ended("the run has ended"))))
    assert notified.done


def test_a_split_server_that_leaves_after_the_end(notified):
    """The wait for its answer ends."""
    notified.up()
    notified.notifier.run_ended("limit")
    notified.session.take(tp.PeerDown("", 1, "bye"))
    assert notified.done


def test_a_split_server_that_is_down_gets_the_end_later(notified):
    """It may be relaunched; `wait` has a limit."""
    notified.up()
    notified.session.take(tp.PeerDown("", 1, "expired"))
    notified.notifier.run_ended("limit")
    assert not notified.done
    notified.up()
    assert notified.session.sent == OVER


@pytest.mark.parametrize("code", ["leaving", "full", "name", "key"])
def test_after_a_temporary_refusal_it_is_dialed_again(notified, code):
    """Another process continues in its folder, a session ends, or a person adds the key.

    It is reported once, if people can act.
    """
    for dials in (1, 2, 3):
        assert notified.session.dials == dials
        notified.refused(code, "not now")
        notified.scheduler.run_until(notified.scheduler.time() + 5.0)
    assert len(notified.notes) == (code != "leaving")
    assert all(note.endswith("not now; trying again") for note in notified.notes)
    notified.up()
    notified.notifier.run_ended("limit")
    assert notified.session.sent == OVER


def test_an_end_between_a_refusal_and_the_next_dial(notified):
    """The next process may be up already: it is dialed at once, and its refusal ends the wait."""
    notified.refused("leaving")
    notified.notifier.run_ended("limit")
    assert notified.session.dials == 2
    notified.refused("leaving")
    assert notified.done
    notified.scheduler.run_until(60.0)
    assert notified.session.dials == 2


@pytest.mark.parametrize(("code", "notes"), [("run", 1), ("finished", 0), ("hello", 1)])
def test_a_permanent_refusal(notified, code, notes):
    """It is reported once, and the end does not wait.

    If the run is finished there, a client sent the end before.
    """
    notified.refused(code)
    notified.scheduler.run_until(60.0)
    assert (notified.session.dials, len(notified.notes)) == (1, notes)
    notified.notifier.run_ended("limit")
    assert notified.notifier._finished.is_set()


def test_no_answer_is_reported_once(notified):
    """The transport goes on dialing, and its reports are not repeated."""
    for _ in range(2):
        notified.session.take(tp.Unreachable("a:1", 30.0))
    assert notified.notes == ["no answer from the split server at a:1 for 30 s; trying again"]
    notified.up()
    notified.session.take(tp.Unreachable("a:1", 30.0))
    assert len(notified.notes) == 2


def test_the_wait_has_a_limit(notified, monkeypatch):
    """A parameter server does not wait forever for a lost split server."""
    monkeypatch.setattr(run_end_notifier, "WAIT_S", 0.05)
    notified.notifier.run_ended("limit")
    asyncio.run(asyncio.wait_for(notified.notifier.wait(), 5.0))
    assert not notified.done

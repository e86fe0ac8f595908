"""Which ends of a parameter server a split server elsewhere is told of.

Those of the run, and no other; and how.
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
    """One without a split server, which keeps the reasons it was given."""

    reasons: tuple[str, ...] = ()

    def run_ended(self, reason):
        """Keep it."""
        Recording.reasons += (reason,)
        super().run_ended(reason)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A function that serves until `end(stop)`, called once clients can come, has its effect.

    Returns the reasons that were told.
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


def test_the_end_of_the_run_is_told(served):
    """Asked once, it stops its clients, and the run is over."""
    served(lambda stop: stop.request(reason="Ctrl-C"))
    assert Recording.reasons == ("Ctrl-C",)


def test_an_end_at_once_is_not(served):
    """Clients hear nothing, and go on with the process that comes next.

    A split server that had ended would refuse them for good.
    """
    served(lambda stop: stop.request(hard=True, reason="Ctrl-C"))
    assert Recording.reasons == ()


def test_a_failure_is_not(served, monkeypatch):
    """It asks for another start, in the same run."""
    shells = []
    start = ParameterServerShell.start
    monkeypatch.setattr(
        ParameterServerShell,
        "start",
        lambda shell, found: (shells.append(shell), start(shell, found)),
    )
    with pytest.raises(RunDirError, match="start this server again"):
        served(lambda _: shells[0].jobs.failed("start this server again"))
    assert Recording.reasons == ()


def test_who_was_told_nothing_keeps_nobody_waiting(monkeypatch):
    """A parameter server that failed is started again as soon as it is gone."""

    async def waited():
        await asyncio.wait_for(RunEndNotifier("run").wait(), 1.0)

    asyncio.run(waited())


class Session:
    """An endpoint that carries nothing: it records calls, and events are put in by hand."""

    def __init__(self, take):
        self.take, self.dials, self.sent, self.left = take, 0, [], False

    def connect(self, hello):
        """Dial."""
        self.dials += 1
        assert msg.from_wire(hello()) == msg.PsHello("run", msg.PS_ROLE)

    def send(self, peer, body):
        """Keep a message."""
        self.sent.append(msg.from_wire(body))

    def disconnect(self, peer="", reason=""):
        """Say goodbye."""
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
        """The split server welcomes it."""
        self.session.take(tp.PeerUp("", 1, msg.to_wire(msg.SplitWelcome("run", 0, "", -1))))

    def refused(self, code, text="x"):
        """The split server refuses it."""
        self.session.take(tp.Refused(code, text))

    @property
    def done(self):
        """Whether nothing is waited for any more."""
        return self.session.left and self.notifier._finished.is_set()


@pytest.fixture
def notified():
    """One that has dialed once."""
    return Notified()


OVER = [msg.RunOver("limit")]


def test_the_end_is_sent_and_answered(notified):
    """In the session that is there, once; nothing is sent before it."""
    notified.up()
    assert notified.session.sent == []
    for _ in range(2):
        notified.notifier.run_ended("limit")
    assert notified.session.sent == OVER
    assert not notified.done
    notified.session.take(tp.MessageReceived("", msg.to_wire(msg.Ended("the run has ended"))))
    assert notified.done


def test_a_split_server_that_leaves_when_it_has_been_told(notified):
    """Its answer is not waited for any longer."""
    notified.up()
    notified.notifier.run_ended("limit")
    notified.session.take(tp.PeerDown("", 1, "bye"))
    assert notified.done


def test_one_that_is_down_at_the_end_is_told_when_it_is_back(notified):
    """It may be being launched again; `wait` has the limit."""
    notified.up()
    notified.session.take(tp.PeerDown("", 1, "expired"))
    notified.notifier.run_ended("limit")
    assert not notified.done
    notified.up()
    assert notified.session.sent == OVER


@pytest.mark.parametrize("code", ["leaving", "full", "name", "key"])
def test_a_refusal_that_passes_is_dialed_again(notified, code):
    """A process goes on in its folder, a session ends, or a person adds the key.

    People read of it once, if they can act.
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
def test_a_refusal_for_good(notified, code, notes):
    """People read of another run's split server, once; the end does not wait for it.

    A client may have been faster.
    """
    notified.refused(code)
    notified.scheduler.run_until(60.0)
    assert (notified.session.dials, len(notified.notes)) == (1, notes)
    notified.notifier.run_ended("limit")
    assert notified.notifier._finished.is_set()


def test_no_answer_is_reported_once(notified):
    """The transport goes on dialing, and would report it every half minute."""
    for _ in range(2):
        notified.session.take(tp.Unreachable("a:1", 30.0))
    assert notified.notes == ["no answer from the split server at a:1 for 30 s; trying again"]
    notified.up()
    notified.session.take(tp.Unreachable("a:1", 30.0))
    assert len(notified.notes) == 2


def test_the_wait_has_a_limit(notified, monkeypatch):
    """A parameter server does not stay for a split server that is gone."""
    monkeypatch.setattr(run_end_notifier, "WAIT_S", 0.05)
    notified.notifier.run_ended("limit")
    asyncio.run(asyncio.wait_for(notified.notifier.wait(), 5.0))
    assert not notified.done

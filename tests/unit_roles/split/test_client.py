"""A client's machine towards the split server, event by event."""

# ruff: noqa: D102 - the driver's methods are named after the events they feed

import attrs
import pytest
from configs import config_of
from machines import Driver, of, told

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import (
    SERVER,
    DeclineStream,
    Finish,
    Greeted,
    HelloRefused,
    Note,
    Received,
    RunEnded,
    SendGoodbye,
    SessionLost,
    StreamLost,
    TrainingEnded,
)
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.messages import UploadKey


def key(step=0, number=0, incarnation=1, leg=0):
    return UploadKey("a", incarnation, number, step, leg)


@attrs.define
class ClientDriver(Driver):
    """A client with events of its split server."""

    def welcome(self, last=None, auxiliary=-1, incarnation=1):
        welcome = msg.SplitWelcome("run", 2, last.text if last else "", auxiliary)
        return self.feed(Greeted(SERVER, welcome, incarnation))

    def ready(self, step, number=0, *, wants=True, due=False, leg=0):
        upload = UploadKey("", 0, number, step, leg)
        meta = msg.SmashedMeta(upload, number, -1, [16, 4], [], 16, 0, wants, due)
        return self.feed(ev.UploadReady(meta))

    def lose(self):
        return self.feed(SessionLost("expired"))

    def trained(self, upload):
        return self.receive(msg.Trained(upload, 2.5))

    def unwanted(self, upload, code):
        return self.receive(msg.UploadRefused(upload, code, "because"))

    def answer(self, upload):
        return self.stream(msg.GradientMeta(upload, 2.5, 7), f"down:{upload.text}")

    def stream(self, meta, stream):
        self.receive(meta, stream=stream)
        return self.feed(ev.VectorReceived(meta))


@pytest.fixture
def make():
    def make(method="splitfed-v2", **rules):
        config = config_of("split", method=method, **rules)
        driver = ClientDriver(SplitClientMachine(config, "a", 1))
        driver.welcome()
        return driver

    return make


def offered(effects):
    return [
        (each.meta.key.step, each.meta.wants_gradient) for each in of(effects, split.OfferUpload)
    ]


def settled(effects):
    return [(each.key, each.answer) for each in of(effects, split.SettleUpload)]


def test_an_upload_and_its_gradient(make):
    """The plain way, of a method that answers."""
    client = make()
    (offer,) = client.ready(0)
    meta = offer.meta
    assert (meta.key, meta.samples, meta.wants_gradient) == (key(0), 16, True)
    stream, answer = "down:a/1/0/0", msg.GradientMeta(key(0), 2.5, 7)
    assert client.receive(answer, stream=stream) == [split.ReceiveVector(stream, answer)]
    effects = client.feed(ev.VectorReceived(answer))
    assert effects == [split.SettleUpload(key(0), "here", 2.5)]
    assert client.feed(ev.VectorReceived(answer)) == [], "it is delivered once"
    effects = client.receive(answer, stream=stream)
    assert effects == [DeclineStream("", stream, "not wanted")]


def test_an_upload_without_an_answer(make):
    """A slot is free again."""
    client = make("cse-fsl")
    client.ready(0, wants=False)
    assert client.trained(key(0)) == [split.SettleUpload(key(0), "none")]
    assert client.trained(key(9)) == []
    assert client.receive(msg.AlreadyTrained(key(9), False)) == []
    assert client.unwanted(key(9), "stale") == []
    assert of(client.answer(key(9)), split.SettleUpload) == []
    # A split server that gives no gradient: the step is left out.
    client = make()
    client.ready(0)
    (effect,) = client.trained(key(0))
    text = "the split server gave no gradient"
    assert effect == split.SettleUpload(key(0), "lost", reason=text)


def test_no_more_than_in_flight_in_order(make):
    """Waiting uploads are offered when a slot is free, in order."""
    client = make(in_flight=2)
    client.ready(0)
    client.ready(1)
    assert client.ready(2) == []
    assert offered(client.answer(key(0))) == [(2, True)]
    effects = client.unwanted(key(1), "later")
    assert offered(effects) == [], "in a while"
    client.ready(3)
    assert offered(client.answer(key(2))) == [], "nothing overtakes it"
    assert offered(client.fire()) == [(1, True), (3, True)]
    assert client.now == 5.0


def test_a_session_is_lost(make):
    """Unsettled uploads that the split server lacks are offered again, with the same keys."""
    client = make(in_flight=2)
    client.ready(0)
    client.answer(key(0))
    client.ready(1)
    assert of(client.lose(), Note)
    assert client.lose() == []
    assert client.ready(2) == []
    assert offered(client.welcome(last=key(0))) == [(1, True), (2, True)]


def test_a_server_that_was_killed(make):
    """It has lost its training since the last checkpoint.

    Kept uploads are offered again, without a gradient.
    """
    client = make(in_flight=2)
    for step in range(3):
        client.ready(step)
        effects = client.answer(key(step))
    assert split.DropUpload(key(0)) in effects, "no more than `RETAIN`"
    assert client.receive(msg.Durable(key(1))) == [split.DropUpload(key(1))]
    client.ready(3)
    client.lose()
    assert offered(client.welcome(last=key(1))) == [(2, False), (3, True)]
    assert client.trained(key(2)) == [], "it is settled already"
    assert settled(client.answer(key(3))) == [(key(3), "here")]


def test_known(make):
    """A trained upload's answer is sent again, or is gone, or is not needed."""
    client = make()
    client.ready(0)
    assert client.receive(msg.AlreadyTrained(key(0), True)) == []
    assert settled(client.answer(key(0))) == [(key(0), "here")]
    client.ready(1)
    assert settled(client.receive(msg.AlreadyTrained(key(1), False))) == [(key(1), "lost")]
    client = make("cse-fsl")
    client.ready(0, wants=False)
    assert settled(client.receive(msg.AlreadyTrained(key(0), False))) == [(key(0), "none")]


@pytest.mark.parametrize("wants", [True, False])
def test_declined(make, wants):
    """It is dropped, and a waiting thread goes on."""
    client = make()
    client.ready(0, wants=wants)
    effects = client.unwanted(key(0), "stale")
    assert "declined upload a/1/0/0: because" in of(effects, Note)[0].text
    assert settled(effects) == [(key(0), "lost" if wants else "none")]
    assert effects[-1] == split.DropUpload(key(0))


def test_streams_that_break(make):
    """An upload is offered again after a pause.

    A lost gradient is requested the same way: the split server streams it again.
    """
    client = make()
    client.ready(0)
    assert client.feed(StreamLost("", "up:a/1/0/0", "broken")) == []
    assert offered(client.fire()) == [(0, True)]
    client.feed(StreamLost("", "down:a/1/0/0", "broken"))
    assert offered(client.fire()) == [(0, True)]
    client.lose()
    assert client.feed(StreamLost("", "up:a/1/0/0", "broken")) == []
    client.welcome()
    client.answer(key(0))
    assert client.feed(StreamLost("", "up:a/1/0/0", "known")) == []
    assert client.machine.next_deadline() is None


def test_an_auxiliary_model_comes(make):
    """It is used from the next step on, with any version: the split server's counts."""
    client = make("fsl-sage")
    client.ready(0, wants=False, due=True)
    stream, model = "aux:a/3", msg.AuxiliaryMeta(3, 0)
    assert client.receive(model, stream=stream) == [split.ReceiveVector(stream, model)]
    assert client.feed(ev.VectorReceived(msg.AuxiliaryMeta(2, 0))) == [], "another one"
    assert client.feed(ev.VectorReceived(model)) == [split.InstallAuxiliary(3)]
    assert client.feed(ev.VectorReceived(model)) == []
    assert client.machine.hello("run", 0, {}).auxiliary == 3
    older = msg.AuxiliaryMeta(1, 0)
    assert client.stream(older, "aux:a/1") == [split.InstallAuxiliary(1)]
    assert of(make().receive(msg.AuxiliaryMeta(3, 0), stream=stream), DeclineStream)


def test_an_alignment_is_lost_with_a_server(make):
    """The new one has neither the upload to train nor another model to send: nothing will come."""
    client = make("fsl-sage")
    client.ready(0, wants=False, due=True)
    client.lose()
    assert split.KeepAuxiliary(0) not in client.welcome(), "the upload is offered again"
    client.trained(key(0))
    client.lose()
    assert split.KeepAuxiliary(0) not in client.welcome(key(0), auxiliary=4), "it is on its way"
    client.lose()
    assert split.KeepAuxiliary(0) in client.welcome(key(0))


@pytest.mark.parametrize(
    ("method", "waits"),
    [("splitfed-v1", True), ("splitfed-v2", False), ("fsl-sage", False), ("sl", True)],
)
def test_a_round_ends(make, method, waits):
    """It is reported when all of its uploads are settled.

    If replicas are averaged, or x_s goes to the next client, the thread waits for the answer.
    """
    client = make(method)
    client.ready(0, wants=False)
    effects = client.feed(ev.RoundEnded(0, 320))
    assert effects == ([] if waits else [split.SettleRound(0)])
    effects = client.trained(key(0))
    assert told(effects) == [msg.RoundDone(0, 320)]
    client.ready(0, number=1, wants=False)
    assert told(client.trained(key(0, number=1))) == [], "once in a session"
    client.lose()
    assert client.machine.hello("run", 0, {}).done_round == -1
    assert told(client.welcome(key(0, number=1))) == [msg.RoundDone(0, 320)]
    assert client.receive(msg.RoundAcknowledged(7)) == []
    effects = client.receive(msg.RoundAcknowledged(0))
    assert effects == ([split.SettleRound(0)] if waits else [])
    hello = client.machine.hello("run", 3, {"cut": "1"})
    assert hello == msg.SplitHello("run", msg.ROLE, 3, {"cut": "1"}, -1, 0, 320)
    client.lose()
    assert told(client.welcome(key(0, number=1))) == []


def test_lockstep_waits_for_everything(make):
    """One upload is in flight, and the end of a round is acknowledged.

    So x_s is trained in the same order as in one process.
    """
    client = make("cse-fsl", mode="lockstep")
    client.ready(0, wants=False)
    assert client.ready(5, wants=False) == []
    client.trained(key(0))
    client.trained(key(5))
    assert told(client.feed(ev.RoundEnded(0, 16))) == [msg.RoundDone(0, 16)]


def test_the_handshake_raises_the_incarnation(make):
    """What was made before is of this life all the same."""
    client = ClientDriver(SplitClientMachine(config_of("split", method="cse-fsl"), "a", 1))
    client.ready(0, wants=False)
    (offer,) = client.welcome(incarnation=77)
    assert offer.meta.key == key(0, incarnation=77)
    assert settled(client.trained(key(0, incarnation=77)))
    assert client.welcome(key(0, incarnation=77), incarnation=77) == []


@pytest.mark.parametrize("how", ["run", "server", "finished", "refused"])
def test_it_is_over(make, how):
    """All waiting uploads are given up, and later ones too.

    The training thread must not wait forever.
    """
    client = make("splitfed-v1")
    client.ready(0)
    client.feed(ev.RoundEnded(0, 16))
    event = {
        "run": RunEnded("limit"),
        "server": Received(SERVER, msg.Ended("Ctrl-C")),
        "finished": HelloRefused("finished", "this run has ended"),
        "refused": HelloRefused("model", "cut differs"),
    }[how]
    effects = client.feed(event)
    for kind in (split.SettleUpload, split.DropUpload, split.SettleRound):
        assert len(of(effects, kind)) == 1, kind
    assert told(effects) == ([msg.RunOver("limit")] if how == "run" else [])
    assert of(effects, Finish) == (
        [Finish("cut differs", ExitCode.BAD_INPUT)] if how == "refused" else []
    )
    assert client.welcome() == []
    assert client.lose() == []
    effects = client.ready(1)
    assert [type(effect) for effect in effects] == [split.SettleUpload, split.DropUpload]
    assert client.feed(ev.RoundEnded(1, 16)) == [split.SettleRound(1)]
    assert client.receive(msg.Ended("again")) == []
    assert client.feed(RunEnded("limit")) == [SendGoodbye("limit")]
    assert client.feed(TrainingEnded(None)) == []
    assert of(client.receive(msg.AuxiliaryMeta(1, 0), stream="aux:a/1"), DeclineStream)


def test_a_server_that_leaves_is_waited_for(make):
    """Another process continues in its folder.

    Nothing is given up, and the next dial is after a pause.
    """
    client = make("splitfed-v1")
    client.ready(0)
    client.feed(SessionLost("bye"))
    assert client.feed(HelloRefused("leaving", "about to end")) == []
    assert client.fire() == [split.DialAgain()]
    assert client.now == client.machine.config.session.reoffer_s
    assert client.feed(HelloRefused("leaving", "about to end")) == []
    assert offered(client.welcome()) == [(0, True)]
    client.feed(SessionLost("bye"))
    client.feed(HelloRefused("leaving", "about to end"))
    client.feed(RunEnded("limit"))
    assert client.machine.next_deadline() is None
    assert client.feed(HelloRefused("leaving", "about to end")) == []
    assert client.machine.next_deadline() is None


def test_the_run_ends_without_a_server(make):
    """There is no session."""
    client = make()
    client.lose()
    assert client.feed(RunEnded("limit")) == [SendGoodbye("limit")]


@pytest.mark.parametrize("how", ["nothing", "error", "answered", "silence"])
def test_training_ends(make, how):
    """What was sent last is waited for a while."""
    client = make("cse-fsl")
    if how != "nothing":
        client.ready(0, wants=False)
    effects = client.feed(TrainingEnded("boom" if how == "error" else None))
    if how == "answered":
        assert effects == []
        effects = client.trained(key(0))
    elif how == "silence":
        assert effects == []
        effects = client.fire()
        assert client.now == 10.0
    assert len(of(effects, SendGoodbye)) == 1
    assert client.machine.next_deadline() is None

"""The split server's machine, event by event."""

# ruff: noqa: D102 - the driver's methods are named after the events they feed

import attrs
import pytest

from fsl_async import effects as do
from fsl_async import effects_split as split
from fsl_async import events as base
from fsl_async import events_split as ev
from fsl_async import messages_split as msg
from fsl_async.events_split import ClientBook, SplitBook, UploadKey
from fsl_async.roles.split_methods import SplitRules
from fsl_async.roles.split_server import SplitServerMachine

HALVES = {"method": "m", "cut": "3", "server": "s"}


def key(client, step=0, number=0, incarnation=1, leg=0):
    return UploadKey(client, incarnation, number, step, leg)


@attrs.define
class Driver:
    """A machine with a clock."""

    machine: SplitServerMachine
    now: float = 0.0

    def feed(self, event, after_s=0.0):
        self.now += after_s
        return self.machine.handle(event, self.now)

    def fire(self):
        self.now = self.machine.next_deadline()
        effects = self.machine.handle(base.TimerFired(), self.now)
        after = self.machine.next_deadline()
        assert after is None or after > self.now
        return effects

    def join(self, peer, incarnation=1, **more):
        return self.feed(ev.SplitClientHello(peer, incarnation, "run", 0, HALVES, **more))

    def offer(self, upload, *, peer=None, wants=True, due=False, auxiliary=-1):
        stream = msg.upload_stream(upload.text)
        work = (0, auxiliary, 16, wants, due)
        return self.feed(ev.UploadOffered(peer or upload.client, stream, upload, *work))

    def arrive(self, upload):
        return self.feed(ev.UploadReceived(upload.client, upload))

    def trained(self, upload, *, answer=False, problem=None):
        return self.feed(ev.UploadTrained(upload, 2.5, 7, answer, problem))

    def upload(self, upload, **more):
        """From the offer until it is trained; returns what training it ended in."""
        answer = more.pop("answer", False)
        self.offer(upload, **more)
        self.arrive(upload)
        return self.trained(upload, answer=answer)


@pytest.fixture
def make():
    def make(method="cse-fsl", **rules):
        driver = Driver(SplitServerMachine(SplitRules(method=method, **rules), HALVES))
        driver.feed(ev.SplitRecovered(SplitBook()))
        return driver

    return make


def told(effects):
    return [effect.message for effect in effects if isinstance(effect, do.Tell)]


def of(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def test_an_upload_from_offer_to_answer(make):
    """The plain way, of a method that answers."""
    server = make("splitfed-v2")
    (admit,) = server.join("a")
    assert admit.welcome == msg.SplitWelcome("run", 2, "", -1)
    one = key("a")
    assert server.offer(one) == [split.ReceiveUpload("a", "up:a/1/0/0", one)]
    assert server.arrive(one) == [split.TrainUpload(one, wants_answer=True, version=0)]
    assert server.trained(one, answer=True) == [
        split.BookUpload(one, "trained"),
        split.SendAnswer("a", one),
    ]
    assert server.feed(ev.AnswerSent("a", one)) == [split.DropAnswer(one)]
    assert server.feed(ev.AnswerSent("a", one)) == []
    assert server.machine.book().clients["a"].last == one


def test_one_at_a_time_in_the_order_of_arrival_and_of_the_keys(make):
    """A writer queue: x_s is changed by one upload after another; what overtook the one before it waits for it."""
    server = make()
    server.join("a")
    server.join("b")
    first, second, other = key("a", 0), key("a", 5), key("b", 0)
    for each in (first, second, other):
        server.offer(each)
    assert server.arrive(second) == []
    assert server.arrive(other) == [split.TrainUpload(other, wants_answer=False, version=0)]
    assert server.arrive(first) == []
    effects = server.trained(other)
    assert told(effects) == [msg.Trained(other.text, 2.5)]
    assert of(effects, split.TrainUpload)[0].key == first
    assert of(server.trained(first), split.TrainUpload)[0].key == second


def test_a_known_upload_is_answered_as_it_was(make):
    """The first answer may have been lost with a session; what is not kept any more is gone."""
    server = make("splitfed-v2", in_flight=2)
    server.join("a")
    for step in range(3):
        effects = server.upload(key("a", step), answer=True)
    assert split.DropAnswer(key("a", 0)) in effects, "kept are in_flight of them"
    effects = server.offer(key("a", 2))
    assert effects[0].reason == "known"
    assert told(effects) == [msg.Known("a/1/0/2", True)]
    assert effects[-1] == split.SendAnswer("a", key("a", 2))
    effects = server.offer(key("a", 0))
    assert told(effects) == [msg.Known("a/1/0/0", False)]
    assert not of(effects, split.SendAnswer)


def test_what_is_not_taken(make):
    """Each with its own reason, before a byte of it is transferred; the same answer again when it is asked again."""
    server = make(in_flight=2)
    server.join("a")
    server.join("b")

    def answer(upload, **more):
        effects = server.offer(upload, **more)
        return of(effects, do.DeclineStream)[0].reason, [type(m).__name__ for m in told(effects)]

    assert answer(key("a"), peer="b") == ("not yours", [])
    assert answer(key("a", incarnation=9)) == ("not yours", [])
    assert answer(key("x")) == ("not yours", [])
    server.offer(key("a", 3))
    assert answer(key("a", 1)) == ("order", ["Unwanted"])
    server.offer(key("a", 4))
    effects = server.offer(key("a", 5))
    assert told(effects)[0].code == "later"
    assert not of(effects, split.BookUpload), "that is no end"
    server.arrive(key("a", 3))
    assert answer(key("a", 3)) == ("here", [])
    assert of(server.offer(key("a", 4)), split.ReceiveUpload), "from the beginning"
    server.trained(key("a", 3))
    server.upload(key("b", 0, number=7))
    effects = server.offer(key("b", 0, number=5))
    assert told(effects) == [msg.Known("b/1/5/0", False)], "b is beyond it"
    effects = server.offer(key("a", 9, number=2))
    assert told(effects)[0].code == "stale"
    assert of(effects, split.BookUpload)[0].outcome == "declined"
    assert not of(server.offer(key("a", 9, number=2)), split.BookUpload), "once in the ledger"


def test_an_upload_that_has_become_stale_in_the_queue(make):
    """Another client's later round was complete before it."""
    server = make(max_stale_rounds=0)
    server.join("a")
    server.join("b")
    server.join("c")
    old = key("a", number=1)
    for upload in (key("c", number=1), key("b", number=2), old):
        server.offer(upload)
    server.arrive(key("c", number=1))
    server.arrive(key("b", number=2))
    server.arrive(old)
    server.trained(key("c", number=1))
    effects = server.trained(key("b", number=2))
    assert split.DropUpload(old) in effects
    assert told(effects)[-1].code == "stale"
    assert server.machine.busy is None


def test_a_session_ends(make):
    """What is here is trained; what was on its way, and what was behind it, is offered again."""
    server = make(in_flight=3)
    server.join("a")
    server.join("b")
    done, here, way, behind = (key("a", step) for step in range(4))
    server.offer(done)
    server.arrive(done)
    for upload in (here, way):
        server.offer(upload)
    server.arrive(here)
    server.feed(base.StreamLost("a", "up:a/1/0/3", "of nobody"))
    server.offer(behind)
    effects = server.feed(base.ClientLeft("a", 1, "expired"))
    assert effects == [split.DropUpload(way)]
    assert server.arrive(way) == [split.DropUpload(way)], "decoded too late"
    assert server.feed(base.ClientLeft("a", 1, "expired")) == []
    effects = server.trained(done)
    assert told(effects) == [], "nobody is there to hear it"
    assert of(effects, split.TrainUpload)[0].key == here
    server.trained(here)
    (admit,) = server.join("a")
    assert admit.welcome.last == here.text
    assert of(server.offer(way), split.ReceiveUpload)


def test_a_client_comes_back_as_a_new_process(make):
    """What its former life sent stays trained; its answers are nobody's."""
    server = make("splitfed-v2")
    server.join("a")
    server.upload(key("a"), answer=True)
    server.offer(key("a", 1))
    server.arrive(key("a", 1))
    effects = server.join("a", 2)
    assert effects[0] == split.DropAnswer(key("a"))
    assert effects[-1].welcome.last == ""
    effects = server.trained(key("a", 1), answer=True)
    assert effects[-1] == split.DropAnswer(key("a", 1))
    assert server.feed(base.ClientLeft("a", 1, "superseded")) == [], "of the life before"
    server.upload(key("a", 0, incarnation=2), answer=True)
    assert server.machine.peers["a"].book.last == key("a", 0, incarnation=2)
    server.feed(base.ClientLeft("a", 2, "expired"))
    assert server.machine.peers["a"].answers


def test_an_answer_for_a_client_that_is_away_is_kept(make):
    """It asks for it when it is back."""
    server = make("splitfed-v2")
    server.join("a")
    server.offer(key("a"))
    server.arrive(key("a"))
    server.feed(base.ClientLeft("a", 1, "expired"))
    assert not of(server.trained(key("a"), answer=True), split.SendAnswer)
    server.join("a")
    assert of(server.offer(key("a")), split.SendAnswer)


def test_a_transfer_breaks_off(make):
    """The client is asked for it again; of streams that go down it asks itself."""
    server = make()
    server.join("a")
    server.offer(key("a"))
    effects = server.feed(base.StreamLost("a", "up:a/1/0/0", "broken"))
    assert told(effects) == [msg.Unwanted("a/1/0/0", "later", "broken")]
    assert server.feed(base.StreamLost("a", "down:a/1/0/0", "broken")) == []
    assert server.feed(base.StreamLost("z", "up:z/1/0/0", "broken")) == []


def test_an_upload_that_makes_no_sense(make):
    """Labels out of range, not finite: it costs its sender that upload."""
    server = make("fsl-sage")
    server.join("a")
    server.offer(key("a"), due=True)
    server.arrive(key("a"))
    effects = server.trained(key("a"), problem="labels must be in 0 ... 9")
    assert [type(m).__name__ for m in told(effects)] == ["Unwanted", "AuxiliaryStays"]
    assert of(effects, split.BookUpload) == [
        split.BookUpload(key("a"), "declined", "refused: labels must be in 0 ... 9")
    ]
    assert told(server.offer(key("a")))[0].code == "refused"


def test_alignment(make):
    """After the first upload of a round that aligns, once; and the client that waits always hears something."""
    server = make("fsl-sage", align_every=2)
    server.join("a")
    effects = server.upload(key("a"), due=True)
    assert effects[-2:] == [split.BookAuxiliary("a", 0), split.Align("a", 0, 0)]
    server.offer(key("a", 5))
    assert server.arrive(key("a", 5)) == [], "the training thread aligns"
    assert not told(server.offer(key("a")))[1:], "what comes of it is said when it is there"
    effects = server.feed(ev.Aligned("a", 0))
    assert effects[0] == split.SendAuxiliary("a", 0, 0)
    assert of(effects, split.TrainUpload)
    assert not of(server.trained(key("a", 5)), split.Align)
    effects = server.offer(key("a"), due=True)
    assert of(effects, split.SendAuxiliary), "it had not got it"
    effects = server.offer(key("a"), due=True, auxiliary=0)
    assert told(effects)[-1] == msg.AuxiliaryStays(0, 0)
    assert not of(server.upload(key("a", number=1)), split.Align)
    server.upload(key("a", number=2), due=True)
    effects = server.feed(ev.Aligned("a", 1, "not finite"))
    assert told(effects) == [msg.AuxiliaryStays(2, 0)]
    assert server.machine.book().clients["a"] == ClientBook(
        1, key("a", number=2), 2, 0, 1, 2, -1, 0
    ), "the number is used up"


@pytest.mark.parametrize("problem", [None, "not finite"])
def test_alignment_for_a_client_that_has_left(make, problem):
    """It gets the model when it is back."""
    server = make("fsl-sage")
    server.join("a")
    server.upload(key("a"), due=True)
    server.feed(base.ClientLeft("a", 1, "expired"))
    assert not told(server.feed(ev.Aligned("a", 0, problem)))
    effects = server.join("a", 2)
    assert of(effects, split.SendAuxiliary) == ([] if problem else [split.SendAuxiliary("a", 0, 0)])


def test_auxiliary_models_have_one_lineage(make):
    """A client that holds a version of a server that died goes back to what is kept; its number is not given again."""
    server = make("fsl-sage")
    server.feed(ev.SplitRecovered(SplitBook(), (), {"b": 6}))
    assert of(server.join("a", auxiliary=4), split.SendAuxiliary) == [
        split.SendAuxiliary("a", -1, -1)
    ]
    assert of(server.upload(key("a")), split.Align)[0].version == 5
    server.feed(ev.Aligned("a", 5))
    server.join("b")
    assert of(server.upload(key("b")), split.Align)[0].version == 7


def test_replicas_are_averaged_before_a_later_round(make):
    """Over those who said that they are done, by samples."""
    server = make("splitfed-v1", checkpoint_every=1000)
    for name in "abc":
        server.join(name)
        server.upload(key(name))
    assert told(server.feed(ev.RoundDoneSaid("a", 0, 30))) == [msg.RoundNoted(0)]
    server.feed(ev.RoundDoneSaid("b", 0, 10))
    server.feed(ev.RoundDoneSaid("a", 0, 99))
    assert server.feed(ev.RoundDoneSaid("stranger", 0, 1)) == []
    later = key("a", number=1)
    server.offer(later)
    assert server.arrive(later) == [split.AverageReplicas(0, {"a": 30, "b": 10})]
    effects = server.feed(ev.ReplicasAveraged(0))
    assert [type(effect) for effect in effects] == [split.Checkpoint, split.TrainUpload]
    assert effects[0].book.averaged == 0
    server.trained(later)
    assert told(server.offer(key("c", 1)))[0].code == "stale", "its replica is replaced"
    server.feed(ev.RoundDoneSaid("b", 1, 5))
    server.feed(ev.RoundDoneSaid("a", 2, 5))
    last = key("a", number=3)
    server.offer(last)
    assert server.arrive(last) == [split.AverageReplicas(2, {"a": 5})]


def test_a_round_that_was_done_before_a_server_died(make):
    """The clients say so again when they say hello."""
    server = make("splitfed-v1")
    server.join("a", done_round=4, done_samples=9)
    server.offer(key("a", number=5))
    assert server.arrive(key("a", number=5)) == [split.AverageReplicas(4, {"a": 9})]


def test_the_last_rounds_replicas_are_averaged_when_the_run_is_over(make):
    """No later upload comes; without it the run's x_s would lack its last round. A server that only stops must not do it."""
    server, stopped = make("splitfed-v1"), make("splitfed-v1")
    for each in (server, stopped):
        for name, samples in (("a", 30), ("b", 10)):
            each.join(name)
            each.upload(key(name))
            each.feed(ev.RoundDoneSaid(name, 0, samples))
    assert not of(stopped.feed(base.DrainAsked("Ctrl-C")), split.AverageReplicas)
    server.feed(ev.RunOverSaid("a", "done"))
    effects = server.feed(ev.RunOverSaid("b", "done"))
    assert of(effects, split.AverageReplicas) == [split.AverageReplicas(0, {"a": 30, "b": 10})]
    assert not of(effects, split.Checkpoint)
    (last,) = server.feed(ev.ReplicasAveraged(0))
    assert last.book.averaged == 0
    assert of(server.feed(ev.CheckpointWritten(last.number)), do.Finish)


def test_checkpoints(make):
    """Every so many uploads and at round ends, one at a time, between two trainings; clients hear what is durable."""
    server = make(checkpoint_every=2, retry_s=30.0)
    server.join("a")
    assert not of(server.upload(key("a", 0)), split.Checkpoint)
    (first,) = of(server.upload(key("a", 1)), split.Checkpoint)
    assert (first.number, first.book.uploads) == (1, 2)
    server.upload(key("a", 2))
    assert not of(server.upload(key("a", 3)), split.Checkpoint), "one at a time"
    effects = server.feed(ev.CheckpointWritten(1))
    assert told(effects) == [msg.Durable("a/1/0/1")]
    assert of(effects, split.Checkpoint)[0].number == 2
    effects = server.feed(ev.CheckpointFailed(2, "no space"))
    assert "no space; next try in 30 s" in effects[0].text
    server.upload(key("a", 4))
    (third,) = of(server.fire(), split.Checkpoint)
    assert (third.number, third.book.uploads, server.now) == (3, 5, 30.0)
    server.feed(base.ClientLeft("a", 1, "expired"))
    assert server.feed(ev.CheckpointWritten(3)) == []
    server.join("a")
    server.offer(key("a", 0, number=1))
    assert not of(server.arrive(key("a", 0, number=1)), split.Checkpoint), "nothing is new"
    server.trained(key("a", 0, number=1))
    server.offer(key("a", 0, number=2))
    effects = server.arrive(key("a", 0, number=2))
    assert [type(effect) for effect in effects] == [split.Checkpoint, split.TrainUpload]
    assert not of(server.feed(ev.CheckpointWritten(4)), split.Checkpoint)


def test_a_checkpoint_waits_for_the_end_of_a_training(make):
    """Otherwise its book would lack what its tensors have."""
    server = make(checkpoint_every=1)
    server.join("a")
    server.upload(key("a", 0))
    server.upload(key("a", 1))
    server.offer(key("a", 2))
    server.arrive(key("a", 2))
    assert not of(server.feed(ev.CheckpointWritten(1)), split.Checkpoint)
    assert of(server.trained(key("a", 2)), split.Checkpoint)


def test_a_server_that_was_killed(make):
    """It goes on from its checkpoint, says what is lost, and takes it again from those who still have it."""
    server = make()
    book = SplitBook("run", 3, -1, 40, {"a": ClientBook(1, key("a", 2, 3), 3)})
    effects = server.feed(ev.SplitRecovered(book, (key("a", 3, 3),)))
    assert "after 40 uploads; 1 upload since" in effects[0].text
    assert of(effects, split.BookUpload)[0].outcome == "dropped"
    (admit,) = server.join("a")
    assert admit.welcome.last == "a/1/3/2"
    assert told(server.offer(key("a", 2, 3)))[0] == msg.Known("a/1/3/2", False)
    assert of(server.upload(key("a", 3, 3)), split.BookUpload)[0].outcome == "trained"
    plain = server.machine.book().to_plain()
    assert SplitBook.from_plain(plain) == server.machine.book()
    effects = make().feed(ev.SplitRecovered(book))
    assert effects[0].text == "continuing after 40 uploads"


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"run": ""}, "run", "join the parameter server first"),
        ({"run": "other"}, "run", "a split server, and a folder, of its own"),
        ({"architecture": {**HALVES, "cut": "4"}}, "model", "cut of z is 4, and 3 at the split"),
        ({"architecture": {**HALVES, "tail": "x"}}, "model", "tail of z is x, and none at the"),
        ({"architecture": {}}, "model", "method of z is none, and m at the split server"),
    ],
)
def test_who_is_refused(make, change, code, words):
    """With the first thing that differs, and the way out."""
    server = make()
    server.join("a")
    hello = attrs.evolve(ev.SplitClientHello("z", 1, "run", 0, HALVES), **change)
    (refusal,) = server.feed(hello)
    assert (refusal.code, words in refusal.text) == (code, True)


def test_the_state_of_clients_is_bounded(make):
    """Each costs memory for good."""
    server = make(max_clients=1)
    server.join("a")
    assert server.join("b")[0].code == "full"
    assert isinstance(server.join("a", 2)[-1], split.AdmitSplit)


def test_u_shape(make):
    """Two uploads a step; the second one finds the first one open, in this session, or is declined."""
    server = make("sl", labels_at_home=True)
    server.join("a")
    first, second = key("a"), key("a", leg=1)
    assert server.machine.decisions.in_flight == 1
    server.upload(first, answer=True)
    assert of(server.offer(second), split.ReceiveUpload)
    server.arrive(second)
    server.trained(second, answer=True)
    assert told(server.offer(key("a", 1, leg=1)))[0].code == "gone"
    server.offer(key("a", 2))
    server.arrive(key("a", 2))
    server.feed(base.ClientLeft("a", 1, "expired"))
    effects = server.trained(key("a", 2), answer=True)
    assert effects[1:] == [split.DropAnswer(key("a", 2)), split.ForgetSteps("a")]
    server.join("a")
    assert told(server.offer(key("a", 2))) == [msg.Known("a/1/0/2", False)]
    server.upload(key("a", 3), answer=True)
    assert split.ForgetSteps("a") in server.feed(base.ClientLeft("a", 1, "expired"))


@pytest.mark.parametrize("over", [False, True])
def test_asked_to_end(make, over):
    """What is here is trained, then a last checkpoint, then everybody hears whether it was the run or this process that ended."""
    server = make()
    server.join("a")
    server.join("b")
    server.upload(key("a", 0))
    server.offer(key("a", 1))
    server.arrive(key("a", 1))
    server.offer(key("a", 2))
    server.arrive(key("a", 2))
    asked = (ev.ConductorEnded if over else base.DrainAsked)("Ctrl-C")
    assert of(server.feed(asked), do.Finish) == []
    assert server.feed(asked) == []
    effects = server.offer(key("b"))
    assert told(effects)[0].code == ("ended" if over else "later")
    assert bool(of(effects, split.BookUpload)) == over, "one that comes again has no fate yet"
    assert server.join("z")[0].code == ("finished" if over else "leaving")
    server.trained(key("a", 1))
    (last,) = of(server.trained(key("a", 2)), split.Checkpoint)
    assert last.book.uploads == 3
    effects = server.feed(ev.CheckpointWritten(1))
    assert told(effects) == [msg.Durable(key("a", 2).text)] + [msg.Ended("Ctrl-C")] * 2 * over
    gone = [] if over else [do.Dismiss("a", "Ctrl-C"), do.Dismiss("b", "Ctrl-C")]
    assert of(effects, do.Dismiss) == gone
    assert effects[-1] == do.Finish("Ctrl-C", 0)
    assert server.feed(base.TimerFired()) == []
    assert server.join("a")[0].code == ("finished" if over else "leaving")
    assert make().feed(base.DrainAsked("nothing done"))[-1] == do.Finish("nothing done", 0)


def test_who_leaves_lets_the_answers_go_first(make):
    """A gradient is in no checkpoint: it would cost a batch. Nobody else keeps the process, and the time is bounded."""

    def leaving(*clients):
        server = make("splitfed-v2")
        for name in clients:
            server.join(name)
            server.upload(key(name), answer=True)
        (last,) = of(server.feed(base.DrainAsked("SIGTERM")), split.Checkpoint)
        assert of(server.feed(ev.CheckpointWritten(last.number)), do.Finish) == []
        return server

    server = leaving("a", "b")
    assert server.feed(ev.AnswerSent("a", key("a"))) == [split.DropAnswer(key("a"))]
    assert server.feed(ev.AnswerSent("b", key("b")))[1:] == [
        do.Dismiss("a", "SIGTERM"), do.Dismiss("b", "SIGTERM"), do.Finish("SIGTERM", 0)
    ]  # fmt: skip
    assert leaving("a").feed(base.ClientLeft("a", 1, "bye"))[-1] == do.Finish("SIGTERM", 0)
    assert leaving("a").fire()[-1] == do.Finish("SIGTERM", 0)


def test_the_run_ends_while_the_server_leaves(make):
    """Then it is over for everybody after all, and the last round's replicas are averaged."""
    server = make("splitfed-v1")
    server.join("a")
    server.join("b")
    server.offer(key("b"))
    server.arrive(key("b"))
    server.feed(ev.RoundDoneSaid("a", 0, 30))
    server.feed(base.DrainAsked("SIGTERM"))
    server.feed(ev.RunOverSaid("a", "limit"))
    assert server.join("z")[0].code == "finished"
    assert of(server.trained(key("b")), split.AverageReplicas)
    (last,) = of(server.feed(ev.ReplicasAveraged(0)), split.Checkpoint)
    effects = server.feed(ev.CheckpointWritten(last.number))
    assert {type(each) for each in told(effects)} == {msg.Durable, msg.Ended}
    assert not of(effects, do.Dismiss)


def test_what_is_too_old_is_declined_by_one_that_leaves(make):
    """Whoever comes after it would decline it too."""
    server = make("splitfed-v1")
    server.join("a")
    server.join("b")
    server.offer(key("a", number=2))
    server.arrive(key("a", number=2))
    server.offer(key("b", number=1))
    server.arrive(key("b", number=1))
    server.feed(base.DrainAsked("SIGTERM"))
    (booked,) = [
        e
        for e in of(server.trained(key("a", number=2)), split.BookUpload)
        if e.outcome != "trained"
    ]
    assert (booked.key, booked.outcome) == (key("b", number=1), "declined")


def test_the_end_does_not_wait_for_everything(make):
    """After a while what waits for training is dropped; what is being trained, and the checkpoint, are not."""
    server = make()
    server.join("a")
    for step in range(2):
        server.offer(key("a", step))
        server.arrive(key("a", step))
    server.feed(base.DrainAsked("Ctrl-C"))
    assert server.fire() == [split.DropUpload(key("a", 1))]
    assert of(server.trained(key("a", 0)), split.Checkpoint)
    effects = server.feed(ev.CheckpointFailed(1, "no space"))
    assert effects[-1].exit_code == 1


def test_the_clients_say_that_the_run_is_over(make):
    """A split server has no clock of its own: it ends when all who are here say so, or one has and the others hang."""
    server = make()
    server.join("a")
    server.join("b")
    server.join("c")
    assert server.feed(ev.RunOverSaid("stranger", "x")) == []
    assert server.feed(ev.RunOverSaid("a", "done")) == []
    assert server.feed(ev.RunOverSaid("b", "done")) == []
    effects = server.feed(base.ClientLeft("c", 1, "expired"))
    assert effects[-1] == do.Finish("the run has ended", 0)
    server = make()
    server.join("a")
    server.join("b")
    assert server.feed(base.ClientLeft("b", 1, "expired")) == []
    server.join("b")
    server.feed(ev.RunOverSaid("a", "done"))
    assert server.fire()[-1] == do.Finish("the run has ended", 0)


def test_what_changes_no_decision(make):
    """Heartbeats are for the journal."""
    assert make().feed(base.BeatHeard("a", {})) == []

"""The split server's machine, event by event: uploads, from their offer to their answer."""

from machines import of, told
from split_machines import key, smashed, split_server

from fsl_async.roles.machine import ClientLeft, DeclineStream, Send, StreamLost
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg


def test_an_upload_from_offer_to_answer():
    """The plain way, of a method that answers."""
    server = split_server("splitfed-v2")
    (admit,) = server.join("a")
    assert admit.welcome == msg.SplitWelcome("run", 2, "", -1)
    one = key("a")
    assert server.offer(one) == [split.ReceiveUpload("a", "up:a/1/0/0", smashed(one))]
    assert server.arrive(one) == [split.TrainUpload(one, wants_answer=True, version=0)]
    assert server.trained(one, answer=True) == [
        split.RecordUpload(one, "trained"),
        split.SendAnswer("a", msg.GradientMeta(one, 2.5, 7)),
    ]
    assert server.feed(ev.AnswerSent("a", one)) == [split.DropAnswer(one)]
    assert server.feed(ev.AnswerSent("a", one)) == []
    assert server.machine.progress().clients["a"].last == one


def test_one_at_a_time_in_the_order_of_arrival_and_of_the_keys():
    """A writer queue: x_s is changed by one upload after another.

    An upload that arrives before its predecessor waits for it.
    """
    server = split_server()
    server.join("a")
    server.join("b")
    first, second, other = key("a", 0), key("a", 5), key("b", 0)
    for each in (first, second, other):
        server.offer(each)
    assert server.arrive(second) == []
    assert server.arrive(other) == [split.TrainUpload(other, wants_answer=False, version=0)]
    assert server.arrive(first) == []
    effects = server.trained(other)
    assert told(effects) == [msg.Trained(other, 2.5)]
    assert of(effects, split.TrainUpload)[0].key == first
    assert of(server.trained(first), split.TrainUpload)[0].key == second


def test_a_known_upload_is_answered_as_it_was():
    """The first answer may be lost with a session; an answer that is not kept is gone."""
    server = split_server("splitfed-v2", in_flight=2)
    server.join("a")
    for step in range(3):
        effects = server.upload(key("a", step), answer=True)
    assert split.DropAnswer(key("a", 0)) in effects, "kept are in_flight of them"
    effects = server.offer(key("a", 2))
    assert effects[0].reason == "known"
    assert told(effects) == [msg.AlreadyTrained(key("a", 2), True)]
    assert effects[-1] == split.SendAnswer("a", msg.GradientMeta(key("a", 2), 2.5, 7))
    effects = server.offer(key("a", 0))
    assert told(effects) == [msg.AlreadyTrained(key("a"), False)]
    assert not of(effects, split.SendAnswer)


def test_what_is_not_taken():
    """Each with its own reason, before a byte of it is transferred.

    Another offer gets the same answer.
    """
    server = split_server(in_flight=2)
    server.join("a")
    server.join("b")

    def answer(upload, **more):
        effects = server.offer(upload, **more)
        return of(effects, DeclineStream)[0].reason, [m.tag for m in told(effects)]

    assert answer(key("a"), peer="b") == ("not yours", [])
    assert answer(key("a", incarnation=9)) == ("not yours", [])
    assert answer(key("x")) == ("not yours", [])
    server.offer(key("a", 3))
    assert answer(key("a", 1)) == ("order", ["upload_refused/1"])
    server.offer(key("a", 4))
    effects = server.offer(key("a", 5))
    assert told(effects)[0].code == "later"
    assert not of(effects, split.RecordUpload), "that is no end"
    server.arrive(key("a", 3))
    assert answer(key("a", 3)) == ("here", [])
    assert of(server.offer(key("a", 4)), split.ReceiveUpload), "from the beginning"
    server.trained(key("a", 3))
    server.upload(key("b", 0, number=7))
    effects = server.offer(key("b", 0, number=5))
    assert told(effects) == [msg.AlreadyTrained(key("b", 0, 5), False)], "b is beyond it"
    effects = server.offer(key("a", 9, number=2))
    assert told(effects)[0].code == "stale"
    assert of(effects, split.RecordUpload)[0].outcome == "declined"
    assert not of(server.offer(key("a", 9, number=2)), split.RecordUpload), "once in the ledger"


def test_an_upload_that_has_become_stale_in_the_queue(monkeypatch):
    """Another client's later round was complete before it."""
    monkeypatch.setattr("fsl_async.roles.split.methods.base.MAX_STALE_ROUNDS", 0)
    server = split_server()
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


def test_a_session_ends():
    """Complete uploads are trained; incomplete ones, and those behind them, are offered again."""
    server = split_server(in_flight=3)
    server.join("a")
    server.join("b")
    done, here, way, behind = (key("a", step) for step in range(4))
    server.offer(done)
    server.arrive(done)
    for upload in (here, way):
        server.offer(upload)
    server.arrive(here)
    server.feed(StreamLost("a", "up:a/1/0/3", "broken"))
    server.offer(behind)
    effects = server.feed(ClientLeft("a", 1, "expired"))
    assert effects == [split.DropUpload(way)]
    assert server.arrive(way) == [split.DropUpload(way)], "decoded too late"
    assert server.feed(ClientLeft("a", 1, "expired")) == []
    effects = server.trained(done)
    assert told(effects) == [], "the client has no session"
    assert of(effects, split.TrainUpload)[0].key == here
    server.trained(here)
    (admit,) = server.join("a")
    assert admit.welcome.last == here.text
    assert of(server.offer(way), split.ReceiveUpload)


def test_a_client_comes_back_as_a_new_process():
    """Uploads of its earlier incarnation stay trained; their answers are dropped."""
    server = split_server("splitfed-v2")
    server.join("a")
    server.upload(key("a"), answer=True)
    server.offer(key("a", 1))
    server.arrive(key("a", 1))
    effects = server.join("a", 2)
    assert effects[0] == split.DropAnswer(key("a"))
    assert effects[-1].welcome.last == ""
    effects = server.trained(key("a", 1), answer=True)
    assert effects[-1] == split.DropAnswer(key("a", 1))
    assert server.feed(ClientLeft("a", 1, "superseded")) == [], "of the life before"
    server.upload(key("a", 0, incarnation=2), answer=True)
    assert server.machine.peers["a"].progress.last == key("a", 0, incarnation=2)
    server.feed(ClientLeft("a", 2, "expired"))
    assert server.machine.peers["a"].answers


def test_an_answer_for_a_client_that_is_away_is_kept():
    """It asks for it when it is back."""
    server = split_server("splitfed-v2")
    server.join("a")
    server.offer(key("a"))
    server.arrive(key("a"))
    server.feed(ClientLeft("a", 1, "expired"))
    assert not of(server.trained(key("a"), answer=True), split.SendAnswer)
    server.join("a")
    assert of(server.offer(key("a")), split.SendAnswer)


def test_a_transfer_breaks_off():
    """The client is asked for it again; of streams that go down it asks itself."""
    server = split_server()
    server.join("a")
    server.offer(key("a"))
    effects = server.feed(StreamLost("a", "up:a/1/0/0", "broken"))
    assert told(effects) == [msg.UploadRefused(key("a"), "later", "broken")]
    assert server.feed(StreamLost("a", "down:a/1/0/0", "broken")) == []
    assert server.feed(StreamLost("z", "up:z/1/0/0", "broken")) == []


def test_an_upload_that_makes_no_sense():
    """Labels out of range, not finite: it costs its sender that upload."""
    server = split_server("fsl-sage")
    server.join("a")
    server.offer(key("a"), due=True)
    server.arrive(key("a"))
    effects = server.trained(key("a"), problem="labels must be in 0 ... 9")
    assert [m.tag for m in told(effects)] == ["upload_refused/1", "auxiliary_stays/1"]
    assert of(effects, split.RecordUpload) == [
        split.RecordUpload(key("a"), "declined", "refused: labels must be in 0 ... 9")
    ]
    kinds = [type(effect) for effect in effects]
    assert kinds.index(split.RecordUpload) < kinds.index(Send), (
        "if it is killed in between, it has sent nothing"
    )
    assert told(server.offer(key("a")))[0].code == "refused"


def test_u_shape():
    """Two uploads a step; the second needs the first one open in this session."""
    server = split_server("sl", labels_at_home=True)
    server.join("a")
    first, second = key("a"), key("a", leg=1)
    assert server.machine.method.in_flight == 1
    server.upload(first, answer=True)
    assert of(server.offer(second), split.ReceiveUpload)
    server.arrive(second)
    server.trained(second, answer=True)
    assert told(server.offer(key("a", 1, leg=1)))[0].code == "gone"
    server.offer(key("a", 2))
    server.arrive(key("a", 2))
    server.feed(ClientLeft("a", 1, "expired"))
    effects = server.trained(key("a", 2), answer=True)
    assert effects[1:] == [split.DropAnswer(key("a", 2)), split.ForgetSteps("a")]
    server.join("a")
    assert told(server.offer(key("a", 2))) == [msg.AlreadyTrained(key("a", 2), False)]
    server.upload(key("a", 3), answer=True)
    assert split.ForgetSteps("a") in server.feed(ClientLeft("a", 1, "expired"))

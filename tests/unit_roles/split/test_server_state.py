"""The state of the split server's machine.

Auxiliary models, replicas, checkpoints, and the clients that may get them.
"""

import pytest
from machines import of, told
from split_machines import HALVES, key, split_server

from fsl_async.roles.machine import ClientLeft
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import ClientProgress, SplitProgress


def test_alignment():
    """It follows the first upload of a round that aligns, once.

    A client that waits always gets an answer.
    """
    server = split_server("fsl-sage", align_every=2)
    server.join("a")
    effects = server.upload(key("a"), due=True)
    assert effects[-2:] == [split.RecordAuxiliary("a", 0), split.Align("a", 0, 0)]
    server.offer(key("a", 5))
    assert server.arrive(key("a", 5)) == [], "the training thread aligns"
    assert not told(server.offer(key("a")))[1:], "the result follows later"
    effects = server.feed(ev.Aligned("a", 0))
    assert effects[0] == split.SendAuxiliary("a", msg.AuxiliaryMeta(0, 0))
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
    assert server.machine.progress().clients["a"] == ClientProgress(
        1, key("a", number=2), 2, 0, 1, 2, -1, 0
    ), "the number is used up"


def test_auxiliary_models_have_one_lineage():
    """A client with a version that the killed split server lost gets the kept one.

    Its number is not given again.
    """
    server = split_server("fsl-sage")
    server.feed(ev.SplitRecovered(SplitProgress(), (), {"b": 6}))
    assert of(server.join("a", auxiliary=4), split.SendAuxiliary) == [
        split.SendAuxiliary("a", msg.AuxiliaryMeta(-1, -1))
    ]
    assert of(server.upload(key("a")), split.Align)[0].version == 5
    server.feed(ev.Aligned("a", 5))
    server.join("b")
    assert of(server.upload(key("b")), split.Align)[0].version == 7


def test_replicas_are_averaged_before_a_later_round():
    """Replicas of clients that reported the round as done are averaged, weighted by samples."""
    server = split_server("splitfed-v1", checkpoint_every=1000)
    for name in "abc":
        server.join(name)
        server.upload(key(name))
    assert told(server.receive(msg.RoundDone(0, 30), "a")) == [msg.RoundAcknowledged(0)]
    server.receive(msg.RoundDone(0, 10), "b")
    server.receive(msg.RoundDone(0, 99), "a")
    assert server.receive(msg.RoundDone(0, 1), "unknown") == []
    later = key("a", number=1)
    server.offer(later)
    assert server.arrive(later) == [split.AverageReplicas(0, {"a": 30, "b": 10})]
    effects = server.feed(ev.ReplicasAveraged(0))
    assert [type(effect) for effect in effects] == [split.Checkpoint, split.TrainUpload]
    assert effects[0].progress.averaged == 0
    server.trained(later)
    assert told(server.offer(key("c", 1)))[0].code == "stale", "its replica is replaced"
    server.receive(msg.RoundDone(1, 5), "b")
    server.receive(msg.RoundDone(2, 5), "a")
    last = key("a", number=3)
    server.offer(last)
    assert server.arrive(last) == [split.AverageReplicas(2, {"a": 5})]


def test_a_round_that_was_done_before_a_server_died():
    """Clients report it again with their hello."""
    server = split_server("splitfed-v1")
    server.join("a", done_round=4, done_samples=9)
    server.offer(key("a", number=5))
    assert server.arrive(key("a", number=5)) == [split.AverageReplicas(4, {"a": 9})]


def test_checkpoints():
    """They are made every few uploads and at ends of rounds, one at a time, between trainings.

    Clients get the keys that are durable.
    """
    server = split_server(checkpoint_every=2)
    server.join("a")
    assert not of(server.upload(key("a", 0)), split.Checkpoint)
    (first,) = of(server.upload(key("a", 1)), split.Checkpoint)
    assert (first.number, first.progress.uploads) == (1, 2)
    server.upload(key("a", 2))
    assert not of(server.upload(key("a", 3)), split.Checkpoint), "one at a time"
    effects = server.feed(ev.CheckpointWritten(1))
    assert told(effects) == [msg.Durable(key("a", 1))]
    assert of(effects, split.Checkpoint)[0].number == 2
    effects = server.feed(ev.CheckpointFailed(2, "no space"))
    assert "no space; next try in 30 s" in effects[0].text
    server.upload(key("a", 4))
    (third,) = of(server.fire(), split.Checkpoint)
    assert (third.number, third.progress.uploads, server.now) == (3, 5, 30.0)
    server.feed(ClientLeft("a", 1, "expired"))
    assert server.feed(ev.CheckpointWritten(3)) == []
    server.join("a")
    server.offer(key("a", 0, number=1))
    assert not of(server.arrive(key("a", 0, number=1)), split.Checkpoint), "nothing is new"
    server.trained(key("a", 0, number=1))
    server.offer(key("a", 0, number=2))
    effects = server.arrive(key("a", 0, number=2))
    assert [type(effect) for effect in effects] == [split.Checkpoint, split.TrainUpload]
    assert not of(server.feed(ev.CheckpointWritten(4)), split.Checkpoint)


def test_a_checkpoint_waits_for_the_end_of_a_training():
    """Otherwise its book would lack what its tensors have."""
    server = split_server(checkpoint_every=1)
    server.join("a")
    server.upload(key("a", 0))
    server.upload(key("a", 1))
    server.offer(key("a", 2))
    server.arrive(key("a", 2))
    assert not of(server.feed(ev.CheckpointWritten(1)), split.Checkpoint)
    assert of(server.trained(key("a", 2)), split.Checkpoint)


def test_a_server_that_was_killed():
    """It continues from its checkpoint, records lost uploads, and accepts them again."""
    server = split_server()
    book = SplitProgress("run", 3, -1, 40, {"a": ClientProgress(1, key("a", 2, 3), 3)})
    effects = server.feed(ev.SplitRecovered(book, (key("a", 3, 3),)))
    assert "after 40 uploads; 1 upload since" in effects[0].text
    assert of(effects, split.RecordUpload)[0].outcome == "dropped"
    (admit,) = server.join("a")
    assert admit.welcome.last == "a/1/3/2"
    assert told(server.offer(key("a", 2, 3)))[0] == msg.AlreadyTrained(key("a", 2, 3), False)
    assert of(server.upload(key("a", 3, 3)), split.RecordUpload)[0].outcome == "trained"
    plain = server.machine.progress().to_plain()
    assert SplitProgress.from_plain(plain) == server.machine.progress()
    effects = split_server().feed(ev.SplitRecovered(book))
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
def test_who_is_refused(change, code, words):
    """With the first thing that differs, and the way out."""
    server = split_server()
    server.join("a")
    (refusal,) = server.join("z", **change)
    assert (refusal.code, words in refusal.text) == (code, True)


def test_the_state_of_clients_is_bounded(monkeypatch):
    """Each costs memory for good."""
    monkeypatch.setattr("fsl_async.roles.split.server.MAX_CLIENTS", 1)
    server = split_server()
    server.join("a")
    assert server.join("b")[0].code == "full"
    assert isinstance(server.join("a", 2)[-1], split.AdmitSplit)


@pytest.mark.parametrize("problem", [None, "not finite"])
def test_alignment_for_a_client_that_has_left(problem):
    """It gets the model when it is back."""
    server = split_server("fsl-sage")
    server.join("a")
    server.upload(key("a"), due=True)
    server.feed(ClientLeft("a", 1, "expired"))
    assert not told(server.feed(ev.Aligned("a", 0, problem)))
    effects = server.join("a", 2)
    assert of(effects, split.SendAuxiliary) == (
        [] if problem else [split.SendAuxiliary("a", msg.AuxiliaryMeta(0, 0))]
    )

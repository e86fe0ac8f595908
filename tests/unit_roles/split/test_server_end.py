"""How the split server's machine ends, or leaves."""

import pytest
from machines import of, told
from split_machines import key, split_server

from fsl_async.roles.machine import ClientLeft, DrainAsked, EndSession, Finish, TimerFired
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg


def test_the_last_rounds_replicas_are_averaged_when_the_run_is_over():
    """No later upload comes; without it the run's x_s would lack its last round.

    A split server that only leaves must not do it.
    """
    server, stopped = split_server("splitfed-v1"), split_server("splitfed-v1")
    for each in (server, stopped):
        for name, samples in (("a", 30), ("b", 10)):
            each.join(name)
            each.upload(key(name))
            each.receive(msg.RoundDone(0, samples), name)
    assert not of(stopped.feed(DrainAsked("Ctrl-C")), split.AverageReplicas)
    server.receive(msg.RunOver("done"), "a")
    effects = server.receive(msg.RunOver("done"), "b")
    assert of(effects, split.AverageReplicas) == [split.AverageReplicas(0, {"a": 30, "b": 10})]
    assert not of(effects, split.Checkpoint)
    (last,) = server.feed(ev.ReplicasAveraged(0))
    assert last.progress.averaged == 0
    assert of(server.feed(ev.CheckpointWritten(last.number)), Finish)


@pytest.mark.parametrize("over", [False, True])
def test_asked_to_end(over):
    """Uploads are trained, a last checkpoint is made, and clients get the kind of the end."""
    server = split_server()
    server.join("a")
    server.join("b")
    server.upload(key("a", 0))
    server.offer(key("a", 1))
    server.arrive(key("a", 1))
    server.offer(key("a", 2))
    server.arrive(key("a", 2))
    asked = (ev.PsEnded if over else DrainAsked)("Ctrl-C")
    assert of(server.feed(asked), Finish) == []
    assert server.feed(asked) == []
    effects = server.offer(key("b"))
    assert told(effects)[0].code == ("ended" if over else "later")
    assert bool(of(effects, split.RecordUpload)) == over, "one that comes again has no fate yet"
    assert server.join("z")[0].code == ("finished" if over else "leaving")
    server.trained(key("a", 1))
    (last,) = of(server.trained(key("a", 2)), split.Checkpoint)
    assert last.progress.uploads == 3
    effects = server.feed(ev.CheckpointWritten(1))
    assert told(effects) == [msg.Durable(key("a", 2))] + [msg.Ended("Ctrl-C")] * 2 * over
    gone = [] if over else [EndSession("a", "Ctrl-C"), EndSession("b", "Ctrl-C")]
    assert of(effects, EndSession) == gone
    assert effects[-1] == Finish("Ctrl-C", 0)
    assert server.feed(TimerFired()) == []
    assert server.join("a")[0].code == ("finished" if over else "leaving")
    assert split_server().feed(DrainAsked("nothing done"))[-1] == Finish("nothing done", 0)


def test_who_leaves_lets_the_answers_go_first():
    """A gradient is in no checkpoint: losing it would lose a batch.

    Only clients that wait for one delay the end, for a limited time.
    """

    def leaving(*clients):
        server = split_server("splitfed-v2")
        for name in clients:
            server.join(name)
            server.upload(key(name), answer=True)
        (last,) = of(server.feed(DrainAsked("SIGTERM")), split.Checkpoint)
        assert of(server.feed(ev.CheckpointWritten(last.number)), Finish) == []
        return server

    server = leaving("a", "b")
    assert server.feed(ev.AnswerSent("a", key("a"))) == [split.DropAnswer(key("a"))]
    assert server.feed(ev.AnswerSent("b", key("b")))[1:] == [
        EndSession("a", "SIGTERM"), EndSession("b", "SIGTERM"), Finish("SIGTERM", 0)
    ]  # fmt: skip
    assert leaving("a").feed(ClientLeft("a", 1, "bye"))[-1] == Finish("SIGTERM", 0)
    assert leaving("a").fire()[-1] == Finish("SIGTERM", 0)


def test_the_run_ends_while_the_server_leaves():
    """Then the run is over for all, and the last round's replicas are averaged."""
    server = split_server("splitfed-v1")
    server.join("a")
    server.join("b")
    server.offer(key("b"))
    server.arrive(key("b"))
    server.receive(msg.RoundDone(0, 30), "a")
    server.feed(DrainAsked("SIGTERM"))
    server.receive(msg.RunOver("limit"), "a")
    assert server.join("z")[0].code == "finished"
    assert of(server.trained(key("b")), split.AverageReplicas)
    (last,) = of(server.feed(ev.ReplicasAveraged(0)), split.Checkpoint)
    effects = server.feed(ev.CheckpointWritten(last.number))
    assert {type(each) for each in told(effects)} == {msg.Durable, msg.Ended}
    assert not of(effects, EndSession)


def test_the_end_does_not_wait_for_everything():
    """After a time limit waiting uploads are dropped.

    The current training and the checkpoint are finished.
    """
    server = split_server()
    server.join("a")
    for step in range(2):
        server.offer(key("a", step))
        server.arrive(key("a", step))
    server.feed(DrainAsked("Ctrl-C"))
    assert server.fire() == [split.DropUpload(key("a", 1))]
    assert of(server.trained(key("a", 0)), split.Checkpoint)
    effects = server.feed(ev.CheckpointFailed(1, "no space"))
    assert effects[-1].exit_code == 1


def test_the_clients_say_that_the_run_is_over():
    """A split server has no clock of its own.

    It ends when all connected clients report the end, or one does and the others hang.
    """
    server = split_server()
    server.join("a")
    server.join("b")
    server.join("c")
    assert server.receive(msg.RunOver("x"), "unknown") == []
    assert server.receive(msg.RunOver("done"), "a") == []
    assert server.receive(msg.RunOver("done"), "b") == []
    effects = server.feed(ClientLeft("c", 1, "expired"))
    assert effects[-1] == Finish("the run has ended", 0)
    server = split_server()
    server.join("a")
    server.join("b")
    assert server.feed(ClientLeft("b", 1, "expired")) == []
    server.join("b")
    server.receive(msg.RunOver("done"), "a")
    assert server.fire()[-1] == Finish("the run has ended", 0)

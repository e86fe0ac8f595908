"""A split server in its own process.

Reports of the run's end, and the end without any.
"""

import pytest
from machines import of, told
from split_machines import key, split_server

from fsl_async.roles.machine import DrainAsked, EndSession, Finish
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import ClientProgress, SplitProgress

BOOK = SplitProgress("run", 3, -1, 40, {"a": ClientProgress(1, key("a", 2, 3), 3)})


def alone(**rules):
    """A split server that continues in a folder, without peers."""
    server = split_server(alone_s=60.0, **rules)
    server.feed(ev.SplitRecovered(BOOK))
    return server


def test_the_parameter_server_says_that_the_run_is_over():
    """No client has a session when the run ends."""
    server = alone()
    (admit,) = server.parameter_server()
    assert admit == split.AdmitSplit(msg.PS_ROLE, 1, msg.SplitWelcome("run", 0, "", -1))
    effects = server.receive(msg.RunOver("Ctrl-C"), msg.PS_ROLE)
    assert told(effects, msg.PS_ROLE) == [msg.Ended("the run has ended")]
    assert effects[-1] == Finish("the run has ended", 0)
    assert server.parameter_server()[0].code == "finished"


def test_clients_that_are_here_are_waited_for():
    """They have open uploads, and get the end at about the same time.

    The wait for one that hangs is short.
    """
    for hangs in (False, True):
        server = alone()
        server.parameter_server()
        server.join("a")
        assert not of(server.receive(msg.RunOver("x"), msg.PS_ROLE), Finish)
        effects = server.fire() if hangs else server.receive(msg.RunOver("x"), "a")
        assert effects[-1] == Finish("the run has ended", 0)


def test_replicas_of_the_last_round_are_averaged():
    """The end is the same as after the clients' reports."""
    server = split_server("splitfed-v1")
    server.join("a")
    server.parameter_server()
    server.upload(key("a"))
    server.receive(msg.RoundDone(0, 30), "a")
    server.leave("a")
    effects = server.receive(msg.RunOver("limit"), msg.PS_ROLE)
    assert of(effects, split.AverageReplicas) == [split.AverageReplicas(0, {"a": 30})]


@pytest.mark.parametrize("who", ["client", "ps"])
def test_one_that_has_anybody_waits(who):
    """A client, or the parameter server, is enough; the time begins when the last one has gone."""
    server = alone()
    come = server.parameter_server if who == "ps" else lambda: server.join("a")
    name = msg.PS_ROLE if who == "ps" else "a"
    come()
    assert server.machine.next_deadline() is None
    server.now = 1000.0
    server.leave(name, incarnation=9)
    assert server.machine.next_deadline() is None, "of another life"
    server.leave(name)
    assert server.machine.next_deadline() == 1060.0
    server.now = 1050.0
    come()
    assert server.machine.next_deadline() is None
    server.join("b")
    server.leave(name)
    assert server.machine.next_deadline() is None, "b is here"
    server.now = 1070.0
    server.leave("b")
    assert server.machine.next_deadline() == 1130.0


def test_who_waits_for_ever():
    """A split server starts before any peer knows its address; and alone_s = 0 means no limit."""
    assert split_server(alone_s=60.0).machine.next_deadline() is None
    server = split_server()
    server.feed(ev.SplitRecovered(BOOK))
    assert server.machine.next_deadline() is None


def test_alone_while_it_ends():
    """The end has its own time."""
    server = split_server(alone_s=60.0)
    server.join("a")
    for step in range(2):
        server.offer(key("a", step))
        server.arrive(key("a", step))
    server.feed(DrainAsked("SIGTERM"))
    server.leave("a")
    assert server.machine.next_deadline() == server.machine.config.session.drain_s


def test_which_parameter_server_is_refused():
    """Of another run, or under another name.

    No other peer may send its messages or use its name.
    """
    server = alone()
    assert server.parameter_server("other")[0].code == "run"
    assert server.parameter_server(peer="a")[0].code == "name"
    assert server.receive(msg.RunOver("x"), msg.PS_ROLE) == [], "it was refused"
    assert server.join(msg.PS_ROLE)[0].code == "name"
    server.feed(DrainAsked("SIGTERM"))
    assert server.parameter_server()[0].code == "leaving"


def test_a_refused_hello_of_the_life_that_has_a_session_changes_nothing():
    """Its run would become the split server's, and every client would be refused."""
    server = alone()
    server.parameter_server()
    assert server.parameter_server("other")[0].code == "run"
    assert server.machine.run == "run"
    assert isinstance(server.join("a")[0], split.AdmitSplit)


def test_a_parameter_server_comes_before_the_first_client():
    """Its run becomes the split server's run."""
    server = split_server(alone_s=60.0)
    server.parameter_server("run-7")
    (refusal,) = server.join("a")
    assert "is in run run-7" in refusal.text
    server.leave(msg.PS_ROLE)
    assert server.machine.next_deadline() == 60.0


def test_one_that_leaves_says_goodbye_to_it_too():
    """It dials again, and finds the process that comes after."""
    server = alone()
    server.parameter_server()
    effects = server.feed(DrainAsked("SIGTERM"))
    assert EndSession(msg.PS_ROLE, "SIGTERM") in effects
    assert server.machine.incarnation_of(msg.PS_ROLE) == 1
    assert server.machine.incarnation_of("a") == 1
    assert server.machine.incarnation_of("unknown") is None

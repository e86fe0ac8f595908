"""Answers to clients that offer what they should not, again and again."""

import pytest

from fsl_async.roles.machine import StreamLost
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey

PROBLEM = "its norm of 1e+30 is above 1e+20: its client has diverged"


def key(sequence, base=0, incarnation=1, client="a"):
    return DeltaKey(client, incarnation, base, sequence)


def is_received(look, effects):
    return bool(look.only(effects, do.ReceiveDelta))


def test_a_client_that_has_diverged_sends_seldom(server, look):
    """353 offers of such a client wrote 184 MB in 20 s."""
    server.begin("a", "b")
    taken = []
    for sequence in range(1, 354):
        if is_received(look, effects := server.offer(key(sequence))):
            taken.append(sequence)
            server.store(key(sequence), problem=PROBLEM)
        else:
            (answer,) = look.sent(effects)
            assert (answer.code, PROBLEM in answer.text) == ("quarantined", True)
        server.now += 20 / 353
    assert len(taken) == 5, "after 1, 2, 4 and 8 seconds more"
    assert not is_received(look, server.offer(key(354)))
    assert is_received(look, server.offer(key(1, client="b"))), "others are not concerned"
    server.committed(1)
    assert not is_received(look, server.offer(key(355)))
    assert is_received(look, server.offer(key(356, base=1))), "it may have recovered"


def test_the_only_client_of_a_run_may_recover_from_a_quarantined_delta(server, look):
    """It went back to the version from which it diverged, and no other client makes a newer one."""
    server.begin("a")
    for sequence, pause_s in ((1, 1.0), (3, 2.0)):
        assert is_received(look, server.offer(key(sequence)))
        server.store(key(sequence), problem=PROBLEM)
        assert not is_received(look, server.offer(key(sequence + 1)))
        server.now += pause_s
    assert is_received(look, server.offer(key(5)))
    server.store(key(5))
    assert is_received(look, server.offer(key(6)))
    server.store(key(6), problem=PROBLEM)
    server.now += 1.0
    assert is_received(look, server.offer(key(7))), "it had recovered"


@pytest.mark.parametrize("incarnation", [0, 2])
def test_a_delta_of_another_incarnation_than_its_session_is_refused(server, look, incarnation):
    """Acknowledged, it would make each delta of the process that is here one of the past."""
    server.begin("a")
    (answer,) = look.sent(server.offer(key(1, incarnation=incarnation)))
    assert (answer.code, answer.text) == ("incarnation", "its session is of incarnation 1")
    assert is_received(look, server.offer(key(1)))


def test_a_known_delta_is_acknowledged_to_the_next_incarnation_too(server, look):
    """The handshake raises the incarnation of a process whose name another one had meanwhile."""
    server.begin("a")
    server.offer(key(1))
    server.store(key(1))
    server.join("a", 2)
    assert look.sent(server.offer(key(1))) == [msg.Accepted(key(1))]


def test_numbers_that_do_not_grow_are_never_acknowledged(server, look):
    """One million, then seven: the second one was "accepted", and no version had it."""
    server.begin("a")
    assert is_received(look, server.offer(key(10**6)))
    assert look.sent(server.offer(key(5)))[0].code == "superseded", "of two that are received"
    server.store(key(10**6))
    (answer,) = look.sent(server.offer(key(7)))
    assert (answer.code, answer.key) == ("superseded", key(7))
    server.committed(1)
    assert look.sent(server.offer(key(8)))[0].code == "superseded"
    assert look.sent(server.offer(key(10**6, base=1)))[0].code == "superseded"
    assert look.sent(server.offer(key(10**6))) == [msg.Accepted(key(10**6))]


def test_the_ledger_and_not_memory_decides_after_a_restart(make_server, look):
    """The last process may have merged the higher number."""
    server = make_server()
    server.recover(1, "d1", digests={0: "d0", 1: "d1"}, settled={key(9): "merged"})
    server.join("a")
    assert look.sent(server.offer(key(9))) == [msg.Accepted(key(9))]
    assert look.sent(server.offer(key(8)))[0].code == "superseded"
    assert is_received(look, server.offer(key(12, base=1))), "numbers may be left out"


def test_refused_deltas_and_broken_streams_are_a_line_a_minute(server, look):
    """What one client sends must not fill the log."""
    server.begin("a")
    lines = []
    for sequence in range(1, 354):
        lost = StreamLost("a", f"delta:{key(sequence).text}", "it was not begun")
        effects = [*server.offer(key(sequence), tokens=0), *server.feed(lost)]
        lines += look.notes(effects).split("\n")
    assert [line[:16] for line in lines if line] == ["refused delta a/", "stream delta:a/1"]
    server.now += 60.0
    assert look.notes(server.offer(key(999), tokens=0)).endswith("(and 352 more were not printed)")

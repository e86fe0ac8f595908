"""Bytes that wait in libzmq: counted by the frames it frees, whatever a peer reports."""

import attrs

from fsl_transport.zmq.pipe import SWEEP_EVERY_S, SendBudget


@attrs.define
class Frame:
    """A tracker that the test finishes."""

    done: bool = False


def test_a_connection_has_a_limit_of_its_own():
    """A peer that does not read must not use the budget of the others."""
    send_budget = SendBudget(100, 1000)
    first, second = Frame(), Frame()
    for frame in (first, second):
        assert send_budget.admits(b"a", 50, 0.0)
        send_budget.add(b"a", 50, frame)
    assert not send_budget.admits(b"a", 1, 0.0)
    assert send_budget.admits(b"b", 100, 0.0)
    second.done = True
    assert not send_budget.admits(b"a", 1, 0.0), "frames leave in order"
    first.done = True
    assert send_budget.admits(b"a", 100, 0.0)
    assert send_budget.total == 0


def test_all_together_have_a_limit():
    """A thousand peers that do not read must not add up.

    Sent frames of other connections are found, but not in every call.
    """
    send_budget = SendBudget(100, 250)
    frames = [Frame() for _ in range(3)]
    for name, frame in zip((b"a", b"b", b"c"), frames, strict=True):
        assert send_budget.admits(name, 80, 0.0)
        send_budget.add(name, 80, frame)
    assert not send_budget.admits(b"d", 80, 0.0)
    frames[1].done = True
    assert not send_budget.admits(b"d", 80, SWEEP_EVERY_S / 2)
    assert send_budget.admits(b"d", 80, SWEEP_EVERY_S)


def test_connections_that_are_empty_are_forgotten():
    """Peers choose their names, and a run lasts for months."""
    send_budget = SendBudget(100, 1000)
    for number in range(50):
        send_budget.add(b"%d" % number, 10, Frame(done=True))
        assert send_budget.size(b"%d" % number) == 0
    assert not send_budget._frames
    assert not send_budget._sizes

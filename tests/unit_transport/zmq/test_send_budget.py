"""What waits inside the sockets: counted by what libzmq gives back, whatever a peer says."""

import attrs

from fsl_transport.zmq.send_budget import SWEEP_EVERY_S, Unsent


@attrs.define
class Frame:
    """A tracker that the test finishes."""

    done: bool = False


def test_a_connection_has_a_limit_of_its_own():
    """One peer that takes nothing must not keep the others from theirs."""
    unsent = Unsent(100, 1000)
    first, second = Frame(), Frame()
    for frame in (first, second):
        assert unsent.fits(b"a", 50, 0.0)
        unsent.add(b"a", 50, frame)
    assert not unsent.fits(b"a", 1, 0.0)
    assert unsent.fits(b"b", 100, 0.0)
    second.done = True
    assert not unsent.fits(b"a", 1, 0.0), "frames leave in order"
    first.done = True
    assert unsent.fits(b"a", 100, 0.0)
    assert unsent.total == 0


def test_all_together_have_a_limit():
    """A thousand peers that take nothing must not add up; what has left elsewhere is found, but not in every call."""
    unsent = Unsent(100, 250)
    frames = [Frame() for _ in range(3)]
    for name, frame in zip((b"a", b"b", b"c"), frames, strict=True):
        assert unsent.fits(name, 80, 0.0)
        unsent.add(name, 80, frame)
    assert not unsent.fits(b"d", 80, 0.0)
    frames[1].done = True
    assert not unsent.fits(b"d", 80, SWEEP_EVERY_S / 2)
    assert unsent.fits(b"d", 80, SWEEP_EVERY_S)


def test_connections_that_are_empty_are_forgotten():
    """Names are the peers' choice, and a run lasts for months."""
    unsent = Unsent(100, 1000)
    for number in range(50):
        unsent.add(b"%d" % number, 10, Frame(done=True))
        assert unsent.size(b"%d" % number) == 0
    assert not unsent._queues
    assert not unsent._sizes

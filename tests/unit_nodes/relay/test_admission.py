"""The connections that a relay accepts, and when it may end while draining."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_async.nodes.relay.relay import QUIET_BYTES, Admission


def test_one_address_never_takes_all_places():
    """One address gets at most half of the places."""
    one = Admission(4)
    answers = [one.accept("a") for _ in range(3)]
    assert answers == ["", "", "2 connections of a already"]
    assert [one.accept(address) for address in "bc"] == ["", ""]
    assert one.accept("d") == "4 connections already"
    one.end("b")
    assert one.accept("a") == "2 connections of a already"
    assert one.accept("d") == ""


def test_a_relay_for_one_connection_takes_one():
    """Half of one is rounded up."""
    one = Admission(1)
    assert one.accept("a") == ""
    assert one.accept("b") == "1 connections already"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_counts_are_those_of_open_connections(steps):
    """A wrong count would refuse all clients at some time."""
    one, there = Admission(4), []
    for address, comes in steps:
        if comes:
            fits = len(there) < 4 and there.count(address) < 2
            assert (one.accept(address) == "") == fits
            there += [address] * fits
        elif address in there:
            one.end(address)
            there.remove(address)
        assert (one.connections, one.addresses) == (len(there), len(set(there)))


def test_a_relay_that_drains_ends_when_no_bytes_move():
    """A transfer delays it, heartbeats do not; without connections it ends at once."""
    one = Admission(4)
    assert one.may_end(0, 0, 0)
    one.accept("a")
    carried = 1_000_000
    other = Admission(4)
    other.accept("a")
    assert not other.may_end(carried, 0, 0), "nothing to compare with yet"
    assert not other.may_end(carried, QUIET_BYTES + 1, 0)
    assert not other.may_end(carried + 1, QUIET_BYTES + 1, 1), "something is held"
    assert other.may_end(carried + 1, 2 * QUIET_BYTES + 1, 0)
    other.end("a")
    assert other.may_end(9 * carried, 0, 1)

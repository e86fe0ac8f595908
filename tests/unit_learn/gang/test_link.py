"""The connections and the shared memory of a gang."""

import os

import pytest

from fsl_async.errors import TaskError
from fsl_async.learn.gang import link as link_module
from fsl_async.learn.gang.link import (
    Link,
    Place,
    Slots,
    address_of,
    listener,
    shared_vector,
    sparse_vector,
)

RANK = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2"}


def test_a_rank_knows_its_place():
    """By what torchrun sets; a process alone is no rank."""
    assert Place.here({}) is None
    assert Place.here({"WORLD_SIZE": "1"}) is None
    place = Place.here(RANK)
    assert place == Place(3, 4, 2, 3, 4)
    assert not place.is_remote
    assert not place.spans_machines


def test_a_rank_knows_whether_its_node_is_here():
    """It is on the machine of rank 0."""
    two = {**RANK, "LOCAL_WORLD_SIZE": "2"}
    places = [
        Place.here({**two, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}) for rank in range(4)
    ]
    assert [place.is_remote for place in places] == [False, False, True, True]
    assert all(place.spans_machines for place in places)


def test_messages_arrive_whole_and_others_are_refused():
    """Of any size; what is no message is an error, and so is an end that has closed."""
    name = f"fsl-test-link-{os.getpid()}"
    with listener(name) as listening:
        rank = Link.dial(name)
        node = Link(listening.accept()[0])
    assert node.receive(0.0) is None
    rank.send("hello", 1, [2.5, None], b"x" * (1 << 16))
    assert node.receive() == ["hello", 1, [2.5, None], b"x" * (1 << 16)]
    for data in (b"\x80", b"\x91\x01", b"\x90"):
        rank._connection.send_bytes(data)
        with pytest.raises(ValueError, match="a message is a name"):
            node.receive()
    rank.close()
    with pytest.raises(EOFError):
        node.receive()
    node.close()
    with pytest.raises(OSError, match="refused"):
        Link.dial(address_of(-1))


def test_a_slot_is_used_again_once_nothing_refers_to_it():
    """New pages would cost time. One that lost ranks may write waits for other ranks."""
    slots = Slots()
    slots.reserve(5, 2)
    first, second = slots.allocate(5), slots.allocate(5)
    assert {slots.number_of(first), slots.number_of(second)} == {0, 1}
    number = slots.number_of(first)
    del first
    torn = slots.allocate(5)
    assert slots.number_of(torn) == number
    slots.retire(torn)
    del torn
    third = slots.allocate(5)
    assert slots.number_of(third) == slots.count - 1 == 2
    slots.restore()
    assert slots.number_of(slots.allocate(5)) == number
    slots.close()


def test_a_slot_is_one_memory_for_all_and_cannot_shrink():
    """Shorter memory would be SIGBUS in a process that has it mapped."""
    slots = Slots()
    mine = slots.allocate(3)
    path = slots.path(slots.number_of(mine))
    shared_vector(path, 3)[:] = [1, 2, 3]
    assert mine.tolist() == [1, 2, 3]
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    with pytest.raises(TaskError, match="12 bytes for a model of 4"):
        shared_vector(path, 4)
    slots.close()


def test_too_little_memory_is_one_line(monkeypatch):
    """It is looked at first: no SIGBUS later, and no process is ended for its pages now."""
    monkeypatch.setattr(link_module, "available_bytes", lambda: 19)
    with pytest.raises(TaskError, match="no memory for a vector"):
        Slots().allocate(5)
    assert len(sparse_vector(1 << 34)) == 1 << 34  # of another machine's rank: its parts alone

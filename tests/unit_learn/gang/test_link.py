"""The socket and the shared memory of a gang."""

import os
import socket
from pathlib import Path

import pytest

from fsl_async.errors import TaskError
from fsl_async.learn.gang import link as link_module
from fsl_async.learn.gang.link import (
    Link,
    Slots,
    address_of,
    listener,
    mapped,
    read_back,
    user_of,
    written,
)
from fsl_async.learn.gang.orders import RankOrders
from fsl_async.roles import gang_messages as msg
from fsl_async.roles.messages import MessageError


@pytest.fixture
def ends():
    """A rank's end and a node's."""
    name = f"fsl-test-link-{os.getpid()}"
    listening = listener(name)
    rank = Link.dial(name, msg.FROM_NODE, msg.FROM_RANKS)
    connected, _ = listening.accept()
    connected.setblocking(True)
    node = Link(connected, msg.FROM_RANKS, msg.FROM_NODE)
    yield rank, node, connected
    rank.close()
    node.close()
    listening.close()


def test_messages_and_descriptors_arrive_whole(ends):
    """A slot comes with the message that names it, and is the same memory."""
    rank, node, connected = ends
    assert user_of(connected) == os.getuid()
    assert node.receive(waits=False) is None
    rank.send(msg.Hello(1, 2, 0))
    assert node.receive() == (msg.Hello(1, 2, 0), [])
    slots = Slots()
    vector = slots.allocate(3)
    number = slots.number_of(vector)
    node.send(msg.Slots(1, [number]), [slots.file(number)])
    message, files = rank.receive()
    assert message == msg.Slots(1, [0])
    there = mapped(files[0], 3)
    there[:] = [1, 2, 3]
    assert vector.tolist() == [1, 2, 3]
    slots.close()


def test_what_is_no_message_is_refused(ends):
    """Bytes of a peer are read strictly, and the descriptors that came with them are closed."""
    rank, node, _ = ends
    before = len(list(Path("/proc/self/fd").iterdir()))
    for data in (b"\xc1", b"\x80", b"\x01" * 40, b"\x81\xa1m\xa4none"):
        socket.send_fds(rank._socket, [data], [0])
        with pytest.raises(MessageError):
            node.receive()
    rank._socket.send(bytes(130 << 10))
    with pytest.raises(MessageError, match="more than"):
        node.receive()
    rank._writes = msg.FROM_NODE
    rank.send(msg.Stop(1))
    with pytest.raises(MessageError):  # a directive is no message of a rank
        node.receive()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    rank.close()
    with pytest.raises(EOFError):
        node.receive()


@pytest.mark.parametrize("leaving", [True, False])
def test_ranks_know_whether_their_client_was_asked_to_end(ends, leaving):
    """By the first stop: a later one finds some ranks in their evaluation, which all must share."""
    rank, node, _ = ends
    orders = RankOrders(rank, 0)
    node.send(msg.Stop(1, leaving))
    node.send(msg.Stop(2, not leaving))
    orders.wait_one()
    orders.wait_one()
    assert orders.stopped
    assert orders.is_leaving is leaving


def test_without_a_node_there_is_an_error():
    """A name that nothing listens at."""
    with pytest.raises(OSError, match="refused"):
        Link.dial(address_of(-1), msg.FROM_NODE, msg.FROM_RANKS)


def test_a_slot_is_used_again_once_nothing_refers_to_it():
    """Memory of a vector is not given back and taken again: new pages would cost time."""
    slots = Slots()
    slots.reserve(5, 2)
    first, second = slots.allocate(5), slots.allocate(5)
    assert {slots.number_of(first), slots.number_of(second)} == {0, 1}
    number = slots.number_of(first)
    del first
    third, fourth = slots.allocate(5), slots.allocate(5)
    assert slots.number_of(third) == number
    assert slots.number_of(fourth) == slots.count - 1 == 2
    slots.close()


def test_memory_cannot_shrink_under_a_reader():
    """That would be SIGBUS in a process that has it mapped."""
    slots = Slots()
    slots.allocate(5)
    with pytest.raises(PermissionError):
        os.ftruncate(slots.file(0), 0)
    with pytest.raises(TaskError, match="20 bytes for a model of 6"):
        mapped(os.dup(slots.file(0)), 6)
    slots.close()


def test_too_little_memory_is_one_line(monkeypatch):
    """It is looked at first: no SIGBUS later, and no process is ended for its pages now."""
    monkeypatch.setattr(link_module, "available_bytes", lambda: 19)
    with pytest.raises(TaskError, match="no memory for a vector"):
        Slots().allocate(5)


def test_a_message_in_memory_has_a_limit():
    """A manifest comes in a file, whose size is looked at before it is read."""
    assert read_back(written(b"abc"), 3) == b"abc"
    with pytest.raises(ValueError, match="3 bytes"):
        read_back(written(b"abc"), 2)


def test_a_slot_that_lost_ranks_may_write_is_used_for_nothing_else():
    """Until other ranks are here."""
    slots = Slots()
    torn = slots.allocate(5)
    number = slots.number_of(torn)
    slots.retire(torn)
    del torn
    other = slots.allocate(5)
    assert slots.number_of(other) != number
    slots.restore()
    assert slots.number_of(slots.allocate(5)) == number
    slots.close()

"""Ranks on other machines: their parts travel, and nothing else gets into the node's vectors."""

import os
import socket
import struct
import time

import msgpack
import numpy as np
import pytest
from ports import free_ports

from fsl_async.learn.gang.link import (
    Link,
    NodeLostError,
    Slots,
    listener,
    mapped,
    read_back,
    sparse,
    written,
)
from fsl_async.learn.gang.orders import RankOrders
from fsl_async.learn.gang.remote import BODY, DATA, MESSAGE, RemoteLink, RemoteRanks
from fsl_async.roles import gang_messages as msg

HOST = ["127.0.0.1"]
VALUES = 10
BODY_OF_ATTACHED = msgpack.packb({"ranges": [[2, 5]], "reads": [[0, 6]], "manifest": []})


class Ends:
    """Rank 0's proxies, and a node's socket without a node."""

    def __init__(self):
        name = f"fsl-test-remote-{os.getpid()}"
        self.listening = listener(name)
        self.proxies = RemoteRanks(name, 2)
        self.slots = Slots()
        self.vectors = []
        self.open = []

    def accept(self):
        """The node's end of the next rank."""
        self.listening.settimeout(20)
        connected, _ = self.listening.accept()
        connected.setblocking(True)
        self.open.append(Link(connected, msg.FROM_RANKS, msg.FROM_NODE))
        return self.open[-1]

    def give_slots(self, node):
        """Two vectors of -1."""
        self.vectors = [self.slots.allocate(VALUES) for _ in range(2)]
        for vector in self.vectors:
            vector[:] = -1
        node.send(msg.Slots(1, [0, 1]), [self.slots.file(slot) for slot in (0, 1)])


@pytest.fixture
def ends():
    made = Ends()
    yield made
    for link in made.open:
        link.close()
    made.proxies.close(5)
    made.listening.close()
    made.vectors.clear()
    made.slots.close()


def attached(rank):
    file = written(BODY_OF_ATTACHED)
    rank.send(msg.Attached("f" * 32), [file])
    os.close(file)


def test_what_a_rank_writes_and_reads_travels(ends):
    """Its parts only, in both directions, before the message that speaks of them."""
    rank = RemoteLink.dial(
        ["no-such-machine.invalid", *HOST], ends.proxies.port, ends.proxies.token
    )
    node = ends.accept()
    rank.send(msg.Hello(1, 2, 0))
    rank.send(msg.Shape(VALUES))
    assert node.receive() == (msg.Hello(1, 2, 0), [])
    assert node.receive() == (msg.Shape(VALUES), [])
    assert rank.receive(waits=False) is None
    ends.give_slots(node)
    message, files = rank.receive()
    assert message == msg.Slots(1, [0, 1])
    mine = [mapped(file, VALUES) for file in files]
    mine[0][:] = 7
    attached(rank)
    message, (file,) = node.receive()
    assert message == msg.Attached("f" * 32)
    assert read_back(file, 1 << 20) == BODY_OF_ATTACHED
    assert ends.vectors[0].tolist() == [-1, -1, 7, 7, 7, -1, -1, -1, -1, -1]

    ends.vectors[1][:] = np.arange(VALUES)
    node.send(msg.Move(2, 1, "add", 1, 0))
    assert rank.receive() == (msg.Move(2, 1, "add", 1, 0), [])
    assert mine[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert mine[0].tolist() == [-1, -1, 7, 7, 7, -1, 7, 7, 7, 7]

    node.send(msg.Snapshot(3, 1, 1))
    rank.receive()
    mine[1][:] = 9
    rank.send(msg.Done(3, tokens=4))
    assert node.receive() == (msg.Done(3, tokens=4), [])
    assert ends.vectors[1].tolist() == [0, 1, 9, 9, 9, 5, 6, 7, 8, 9]

    ends.vectors[0][:] = 3
    node.send(msg.Base(4, 2, 0))
    rank.receive()
    assert mine[0].tolist() == [3] * 6 + [7] * 4
    rank.close()
    with pytest.raises(EOFError):
        node.receive()


def test_a_node_that_ends_is_noticed(ends):
    """As at a socket of the same machine."""
    rank = RemoteLink.dial(HOST, ends.proxies.port, ends.proxies.token)
    ends.accept().close()
    for _ in range(2):
        with pytest.raises((EOFError, OSError)):
            rank.receive()
    rank.close()


def test_nothing_listens_once_all_ranks_are_here(ends):
    """Two are expected."""
    address = HOST, ends.proxies.port, ends.proxies.token
    ranks = [RemoteLink.dial(*address) for _ in range(2)]
    with pytest.raises(NodeLostError, match="cannot reach rank 0"):
        RemoteLink.dial(*address)
    for rank in ranks:
        ends.accept()
        rank.close()


def test_directives_are_passed_once_the_last_rank_has_them(ends):
    """Rank 0 has all ranks apply no directive whose data are still on their way."""
    assert ends.proxies.passed(5) == 5
    rank = RemoteLink.dial(HOST, ends.proxies.port, ends.proxies.token)
    node = ends.accept()
    assert ends.proxies.passed(5) == 0
    for number in (1, 2):
        node.send(msg.Resume(number))
        rank.receive()
    deadline = time.monotonic() + 5
    while ends.proxies.passed(5) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank.close()


def test_all_ranks_act_on_what_the_ranks_elsewhere_have(ends, monkeypatch):
    """Rank 0 tells the others to apply no more; what it has applied itself stays."""
    rank = RemoteLink.dial(HOST, ends.proxies.port, ends.proxies.token)
    node, passed = ends.accept(), 0
    orders = RankOrders(rank, 0)
    orders.passed = lambda number: min(number, passed)
    monkeypatch.setattr(orders, "_all_reduce", lambda found, by: None)
    for number in (1, 2):
        node.send(msg.Pace(number, 10 * number))
    deadline = time.monotonic() + 5
    while len(orders._received) < 2 and time.monotonic() < deadline:
        orders.agree()
    assert orders.pace_steps == 0
    for passed in (1, 2):
        orders.agree()
        assert orders.pace_steps == 10 * passed
    rank.close()


def test_a_sparse_slot_takes_pages_for_its_parts_alone():
    """Also one that has data before it is mapped."""
    file = sparse(1 << 20)
    os.pwrite(file, b"x" * 4096, 0)
    mapped(os.dup(file), 1 << 20)[1 << 19] = 1
    assert os.fstat(file).st_blocks * 512 == 2 * 4096
    os.close(file)


def test_another_token_reaches_no_node(ends):
    """Neither a wrong one nor none."""
    with pytest.raises(NodeLostError, match=r"127\.0\.0\.1 port \d+: "):
        RemoteLink.dial(HOST, ends.proxies.port, bytes(32))
    with pytest.raises(NodeLostError, match=r"127\.0\.0\.1: "):
        RemoteLink.dial(HOST, free_ports(1)[0], bytes(32))
    ends.listening.settimeout(0.2)
    with pytest.raises(TimeoutError):
        ends.listening.accept()


def frame(kind, body):
    return struct.pack("<BQ", kind, len(body)) + body


def data(slot, start, values):
    return frame(DATA, struct.pack("<IQ", slot, start) + bytes(4 * values))


@pytest.mark.parametrize(
    "sent",
    [
        data(0, 0, 3),  # of another rank
        data(0, 2, 4),
        data(5, 2, 3),
        data(0, 2**63, 3),
        data(0, 8, 5),
        frame(DATA, b"\0" * 7),
        frame(9, b""),
        struct.pack("<BQ", MESSAGE, 2**62),
        struct.pack("<BQ", BODY, 2**40),
        frame(MESSAGE, b"\xc1"),
        frame(MESSAGE, msgpack.packb({"m": "gang-stop/2", "number": 1})),
        frame(BODY, BODY_OF_ATTACHED),  # a second one could widen what it may write
        frame(BODY, b"\x93"),
        frame(BODY, msgpack.packb({"ranges": [[1, "x"]], "reads": []})),
        frame(BODY, msgpack.packb([1])),
    ],
)
def test_what_is_no_frame_of_a_rank_ends_its_connection(ends, sent):
    """Nothing of it is written, and no memory is taken for what it announces."""
    with socket.create_connection(("127.0.0.1", ends.proxies.port)) as rank:
        rank.sendall(ends.proxies.token)
        node = ends.accept()
        rank.sendall(frame(MESSAGE, msgpack.packb(msg.FROM_RANKS.to_wire(msg.Shape(VALUES)))))
        node.receive()
        ends.give_slots(node)
        rank.sendall(frame(BODY, BODY_OF_ATTACHED))
        rank.sendall(sent)
        with pytest.raises(EOFError):
            node.receive()
    assert all((vector == -1).all() for vector in ends.vectors)

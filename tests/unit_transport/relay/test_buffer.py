"""What waits inside a relay is bounded, complete and in order, moved by the kernel or by us."""

import contextlib
import errno
import random
import select
import socket

import pytest

from fsl_transport.relay import buffer as buffers
from fsl_transport.relay.buffer import (
    COPY_BYTES,
    PIPE_BYTES,
    CopyBuffer,
    PipeBuffer,
    PipePool,
)

splices = pytest.mark.skipif(not buffers.can_splice(), reason="this system has no splice")
KINDS = [CopyBuffer, pytest.param(PipeBuffer, marks=splices)]


@pytest.fixture
def new_buffer():
    """A function that makes buffers, closed at the end."""
    made = []

    def make(kind):
        made.append(kind())
        return made[-1]

    yield make
    for one in made:
        if isinstance(one, PipeBuffer):
            one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_comes_out(pair, new_buffer, kind):
    """Any sizes, a target that accepts nothing at times, never more inside than the bound."""
    client, source, target, server = pair
    rng = random.Random(1)
    data = rng.randbytes(6_000_000)
    one, got, sent, most, blocked = new_buffer(kind), bytearray(), 0, 0, 0
    while len(got) < len(data):
        with contextlib.suppress(BlockingIOError):
            sent += client.send(data[sent : sent + rng.choice([1, 100, 70_000, 3_000_000])])
        with contextlib.suppress(BlockingIOError):
            if not one.held:
                assert one.fill(source) == one.held > 0
                most = max(most, one.held)
        try:
            while one.held:
                one.drain(target)
        except BlockingIOError:
            blocked += 1
        if blocked % 3 == 2 or sent == len(data):  # at times it accepts something
            blocked += 1
            with contextlib.suppress(BlockingIOError):
                got += server.recv(1 << 20)
    assert blocked > 3
    assert got == data
    assert most <= (COPY_BYTES if kind is CopyBuffer else PIPE_BYTES)
    client.shutdown(socket.SHUT_WR)
    select.select([source], [], [], 20)
    assert one.fill(source) == 0


@pytest.mark.parametrize("why", ["no splice", "no descriptor"])
def test_where_there_is_no_pipe_it_copies(monkeypatch, why):
    """As on another system, or without a free descriptor."""

    def fail():
        raise OSError(errno.EMFILE, "too many open files")

    if why == "no splice":
        monkeypatch.setattr(buffers, "can_splice", lambda: False)
    else:
        monkeypatch.setattr(buffers, "PipeBuffer", type("None", (), {"__init__": lambda _: fail()}))
    assert type(PipePool().take()) is CopyBuffer

"""Credit through endpoints over memory: it follows the path, the session's part and the budget."""

import pytest

from fsl_transport import Conditions, PeerUp, StreamOffered, StreamSent, TransportSettings
from fsl_transport.session import frames


@pytest.fixture
def world(mem_world):
    return mem_world(Conditions(delay_s=0.02))


def limits(operations, op, field):
    """Return the credit in each of these operations."""
    return [fields[field] for _, one, fields in operations if one == op]


def test_credit_follows_the_measured_path(mem_world, new_source, new_sink, watch_operations):
    """On a long fast path the first stream asks for more while the path is measured; the next one
    starts with enough.
    """
    bytes_per_s, delay_s = 125e6, 0.045
    world = mem_world(Conditions(delay_s=delay_s, bytes_per_s=bytes_per_s))
    settings = TransportSettings()
    ps, client = world.listener(settings=settings), world.dialer(settings=settings)
    world.until(lambda: client.count(PeerUp))
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, new_sink())
    theirs, ours = watch_operations(ps), watch_operations(client)
    chunks = [b"x" * (1 << 20)] * 48
    client.endpoint.offer("", "first", {}, new_source(chunks))
    world.until(lambda: client.count(StreamSent) == 1)
    targets = limits(ours, frames.BLOCKED, 2)
    product = bytes_per_s * 2 * delay_s
    assert targets == sorted(targets)
    assert targets[0] < product < targets[-1] < 4 * product, "as far as it is measured"
    ours.clear()
    client.endpoint.offer("", "second", {}, new_source(chunks))
    world.until(lambda: client.count(StreamSent) == 2)
    assert not limits(ours, frames.BLOCKED, 1)
    first, second = limits(theirs, frames.ACCEPT, 4)
    assert first == settings.window_bytes
    assert second == 2 * limits(ours, frames.OFFER, 3)[0] >= 2 * product


TARGETS = [
    (0, 1 << 20),
    ((1 << 19) + 1, (1 << 20) + 2),
    (3 << 19, 3 << 20),
    ((1 << 21) - 1, (1 << 22) - 2),
    (1 << 62, 1 << 22),
]


@pytest.mark.parametrize(("target", "window"), TARGETS)
def test_a_sender_may_claim_any_path_and_gets_at_most_the_limits(
    new_settings, world, new_sink, watch_operations, *, target, window
):
    """Its measurement is a claim; the largest window and the budget are the receiver's. In OFFER
    and in BLOCKED.
    """
    ps = world.listener(settings=new_settings(window_limit_bytes=1 << 22))
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    theirs = watch_operations(ps)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, new_sink())
    send_op = client.endpoint._peer.send_op
    send_op(frames.OFFER, (1, "s", 90, target, {}))
    send_op(frames.OFFER, (2, "t", 90, 0, {}))
    world.until(lambda: ps.count(StreamOffered) == 2)
    assert limits(theirs, frames.ACCEPT, 4) == [window, 1 << 20]
    send_op(frames.BLOCKED, (2, 1 << 20, target))
    world.run(1)
    grown = window if window > 1 << 20 else 2 << 20  # doubled: the path's need was granted
    assert limits(theirs, frames.CREDIT, 1) == [grown]


def test_the_streams_of_one_session_share_its_part_of_the_budget(
    new_settings, world, new_sink, watch_operations
):
    """However many streams it starts and whatever it claims, it leaves memory for other sessions.
    Finished streams do not count.
    """
    settings = new_settings(window_limit_bytes=1 << 23, receive_budget_bytes=1 << 24)
    part, chunk = settings.receive_budget_bytes // 4, settings.chunk_limit_bytes
    ps, client = world.listener(settings=settings), world.dialer()
    world.until(lambda: client.count(PeerUp))
    theirs = watch_operations(ps)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, new_sink())
    send_op = client.endpoint._peer.send_op
    granted_to = {}

    def claim(numbers):
        for _ in range(5):
            for number in numbers:
                if number in granted_to:
                    send_op(frames.BLOCKED, (number, granted_to[number], 1 << 40))
                else:
                    send_op(frames.OFFER, (number, f"s{number}", 90, 1 << 40, {}))
            world.run(0.5)
            for _, op, fields in theirs:
                if op in {frames.ACCEPT, frames.CREDIT}:
                    granted_to[fields[0]] = fields[4 if op == frames.ACCEPT else 1]
            theirs.clear()

    claim([1, 2])
    assert part - chunk < sum(granted_to.values()) <= part + chunk
    claim(range(1, 11))
    assert sum(granted_to.values()) <= part + 9 * chunk
    assert all(granted_to[number] >= chunk for number in range(1, 11))
    for number in range(1, 11):
        send_op(frames.STOP, (number, "no longer needed"))
    world.run(1)
    granted_to.clear()
    send_op(frames.OFFER, (11, "s11", 90, 0, {}))
    world.run(0.5)
    granted_to[11] = settings.window_bytes
    claim([11])
    assert part - chunk < granted_to[11] <= part, "alone it may grow"


def test_bytes_still_being_written_count_for_their_session(
    new_settings, world, new_source, new_sink, watch_operations
):
    """Otherwise a peer that starts and stops streams fills the memory."""
    settings = new_settings(
        window_bytes=1 << 21, window_limit_bytes=1 << 22, receive_budget_bytes=1 << 24
    )
    ps, client = world.listener(settings=settings), world.dialer(settings=settings)
    world.until(lambda: client.count(PeerUp))
    sinks, theirs = [new_sink(hold=True), *(new_sink() for _ in range(3))], watch_operations(ps)
    left = list(sinks)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, left.pop(0))
    client.endpoint.offer("", "first", {}, new_source([bytes(1 << 18)] * 20))
    world.until(lambda: len(sinks[0].got) == 8)
    client.endpoint.cancel("", "first", "no longer needed")

    def granted(number):
        world.run(0.5)
        theirs.clear()
        fields = (number, f"s{number}", 90, 1 << 40, {})
        client.endpoint._peer.send_op(frames.OFFER, fields)
        world.run(0.5)
        client.endpoint._peer.send_op(frames.STOP, (number, "nor is this"))
        return limits(theirs, frames.ACCEPT, 4)

    assert granted(7) == [(1 << 22) - (8 << 18)]
    sinks[0].release(4)
    assert granted(8) == [(1 << 22) - (4 << 18)]
    sinks[0].release()
    assert granted(9) == [1 << 22]

"""The credit of the ends bounds what waits in a relay between them."""

import pytest

from fsl_transport import PeerUp, StreamOffered, StreamSent, TransportSettings

CHUNK_BYTES = 64 << 10
WINDOW_BYTES = 1 << 20


@pytest.mark.parametrize("world", ["relay"], indirect=True)
def test_a_server_that_does_not_write_fills_no_relay(world, new_sink, new_source):
    """It reads only what it granted, so none of 16 MiB waits in a relay until it writes."""
    settings = TransportSettings(
        chunk_limit_bytes=CHUNK_BYTES,
        eager_bytes=CHUNK_BYTES,
        window_bytes=WINDOW_BYTES,
        window_limit_bytes=WINDOW_BYTES,
    )
    sink = new_sink(hold=True)
    server, client = world.listener(settings=settings), world.dialer()
    world.until(lambda: client.count(PeerUp))
    server.on[StreamOffered] = lambda offered: server.endpoint.accept(
        offered.peer, offered.stream_id, sink
    )
    client.endpoint.offer("", "update", {}, new_source([bytes(CHUNK_BYTES)] * 256))
    world.until(lambda: len(sink.got) >= WINDOW_BYTES // CHUNK_BYTES)
    world.run(0.5)  # bytes in flight, and any that should not be
    for relay in world.relays:
        up, _, held = relay.carried()
        assert held == 0
        assert up < 2 * WINDOW_BYTES
    assert sum(map(len, sink.got.values())) <= WINDOW_BYTES
    sink.hold = False
    sink.release()
    world.until(lambda: client.count(StreamSent))

"""Strangers with real sockets against one listener: the honest client's session stays, its bytes arrive, memory stays bounded.

How much slower a whole sync of a real server gets is measured by benchmarks/strangers.py; here only what must always hold,
and only for those attacks that leave a test beside them, in one process, time of its own.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from fsl_transport import (
    MessageReceived,
    PeerDown,
    PeerUp,
    StreamOffered,
    StreamReceived,
    TransportSettings,
)

PATH = Path(__file__).parents[2] / "benchmarks" / "attacks.py"
GROWN_LIMIT_BYTES = 200 << 20


def loaded():
    found = importlib.util.spec_from_file_location("fsl_attacks", PATH)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


attacks = loaded()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["slow loris", "oversized", "fresh names", "replayed"])
def test_the_honest_client_notices_little(name, zmq_world, new_source, new_sink):
    """Slow, oversized, replayed and reordered strangers, hundreds of connections, a flood of names."""
    ps = zmq_world.listener(settings=TransportSettings())  # as a server has them: 20 s of silence
    sink = new_sink()
    ps.on[StreamOffered] = lambda e: (
        e.peer == "honest" and ps.endpoint.accept(e.peer, e.stream_id, sink)
    )
    client = zmq_world.dialer("honest", settings=TransportSettings())
    zmq_world.until(lambda: client.count(PeerUp))
    client.endpoint.send("", {"n": 0})
    zmq_world.until(lambda: ps.count(MessageReceived))
    before = resident_bytes()
    attack = attacks.Attack(name, ps.endpoint.address)
    attack.start()
    try:
        zmq_world.until(lambda: attack.steps >= 3 or attack.problem, units=600)
        said = sum(isinstance(e, MessageReceived) and e.peer == "honest" for e in ps.story)
        client.endpoint.offer("", "s", {}, new_source([bytes(100_000)] * 20))
        for number in range(20):
            client.endpoint.send("", {"n": number})
            zmq_world.run(0.2)
        heard = lambda: sum(isinstance(e, MessageReceived) and e.peer == "honest" for e in ps.story)  # noqa: E731
        zmq_world.until(lambda: heard() == said + 20, units=600)
        zmq_world.until(
            lambda: any(isinstance(e, StreamReceived) and e.peer == "honest" for e in ps.story),
            units=600,
        )
    finally:
        attack.stop()
    assert not attack.problem
    assert not [
        event for event in ps.story if isinstance(event, PeerDown) and event.peer == "honest"
    ]
    assert not client.count(PeerDown)
    assert ps.endpoint.early_held_bytes <= ps.endpoint.settings.early_total_bytes
    assert resident_bytes() - before < GROWN_LIMIT_BYTES

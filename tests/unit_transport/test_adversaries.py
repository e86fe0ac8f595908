"""Attackers with real sockets against one listener.

The honest client's session stays, its bytes arrive, and memory stays bounded.
benchmarks/under_attack.py measures how much an attack slows a sync of a real parameter server. Here
is what must always hold, in one process, for a moment of each attack, and evidence that each attack
does what its name states.
"""

import importlib.util
import os
import sys
from pathlib import Path

import msgpack
import pytest

from fsl_transport import (
    HelloReceived,
    MessageReceived,
    PeerDown,
    PeerUp,
    StreamOffered,
    StreamReceived,
    TransportSettings,
)
from fsl_transport.session import frames

PATH = Path(__file__).parents[2] / "benchmarks" / "attacks.py"
GROWN_LIMIT_BYTES = 200 << 20
SETTINGS = TransportSettings()


def loaded():
    found = importlib.util.spec_from_file_location("fsl_attacks", PATH)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


attacks = loaded()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Field:
    """A listener, an honest client with a session, and an attacker."""

    def __init__(self, world, sinks):
        self.world = world
        self.ps = world.listener(settings=SETTINGS)  # a server's: 20 s of silence
        self.ps.on[StreamOffered] = lambda e: (
            e.peer == "honest" and self.ps.endpoint.accept(e.peer, e.stream_id, sinks())
        )
        self.answers = []  # (name, head, origin) on control connections
        send = self.ps.link.send
        self.ps.link.send = lambda peer, lane, parts, origin=b"", stripe=0: (
            self.answers.append((peer, bytes(parts[0]), origin)),
            send(peer, lane, parts, origin, stripe),
        )
        self.client = world.dialer("honest", settings=SETTINGS, connect=False)
        self.recording = attacks.record(self.client.link, "honest")
        self.client.endpoint.connect(dict)
        world.until(lambda: self.client.count(PeerUp))

    def of(self, name, kind):
        """Events of one kind about a peer."""
        return [event for event in self.ps.all(kind) if event.peer.startswith(name)]

    def arrived(self, stream_id):
        """Return whether the honest client's stream arrived completely."""
        return any(event.stream_id == stream_id for event in self.of("honest", StreamReceived))


def pending(field):
    """Number of connections without a session: all but the honest client's two."""
    return field.ps.link.connections - 2


EVIDENCE = {
    "slow loris": lambda field: pending(field) >= 200 and not field.of("", HelloReceived)[1:],
    "half open": lambda field: pending(field) >= 150 and not field.of("", HelloReceived)[1:],
    "half greeting": lambda field: pending(field) >= 30 and not field.of("", HelloReceived)[1:],
    "oversized": lambda field: field.ps.endpoint.bad_messages >= 3,
    "fresh names": lambda field: len(field.of("fresh-", HelloReceived)) >= 3,
    # The honest session's id on another connection gets UNKNOWN there.
    "replayed": lambda field: (
        ("honest", msgpack.packb([frames.UNKNOWN, field.recording.session]))
        in {answer[:2] for answer in field.answers}
    ),
    "fast speaker": lambda field: (
        len(field.of("attacker", MessageReceived)) >= 10
        and field.ps.endpoint.receive_budget.eager_bytes >= 4 * attacks.EARLY_BYTES
        and not field.of("attacker", PeerDown)
        and not field.ps.link.incomplete
    ),
}
"""What the listener must have seen for an attack to be the one it is named after."""
IN_CI = ("replayed", "fast speaker")
"""Hundreds of connections cost seconds of a core. The limits that stop them are tested alone."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "name",
    [
        one if one in IN_CI else pytest.param(one, marks=pytest.mark.sweep)
        for one in attacks.ATTACKS
    ],
)
def test_the_honest_client_is_not_harmed(name, zmq_world, new_source, new_sink):
    """Slow, silent, oversized, replayed and reordered traffic, hundreds of connections, many names.

    The honest session stays the same, its messages arrive once each and in order, its stream
    arrives, and nothing else arrives under its name.
    """
    field = Field(zmq_world, new_sink)
    ps, client = field.ps, field.client
    client.endpoint.send("", {"n": 0})
    client.endpoint.offer("", "before", {}, new_source([bytes(1000)] * 2))
    zmq_world.until(lambda: field.arrived("before"))
    before = resident_bytes()
    attack = attacks.Attack(name, ps.endpoint.address, field.recording)
    attack.start()
    try:
        zmq_world.until(lambda: EVIDENCE[name](field) or attack.problem, units=600)
        client.endpoint.offer("", "during", {}, new_source([bytes(100_000)] * 20))
        for number in range(1, 21):
            client.endpoint.send("", {"n": number})
            zmq_world.run(0.2)
        zmq_world.until(lambda: len(field.of("honest", MessageReceived)) >= 21, units=600)
        zmq_world.until(lambda: field.arrived("during"), units=600)
    finally:
        attack.stop()
    assert not attack.problem
    assert [event.body["n"] for event in field.of("honest", MessageReceived)] == list(range(21))
    assert len(field.of("honest", HelloReceived)) == 1
    assert not field.of("honest", PeerDown)
    welcomes = [
        answer for answer in field.answers if msgpack.unpackb(answer[1])[0] == frames.WELCOME
    ]
    origins = {origin for name, _, origin in welcomes if name == "honest"}
    assert len(origins) == 1, "the session's id goes to one connection"
    assert client.count(PeerUp) == 1
    assert not client.count(PeerDown)
    assert ps.endpoint.receive_budget.eager_bytes <= ps.endpoint.settings.eager_total_bytes
    assert resident_bytes() - before < GROWN_LIMIT_BYTES

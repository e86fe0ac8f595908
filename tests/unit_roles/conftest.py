"""Drivers of machines for scenarios: they feed events and return the effects."""

# ruff: noqa: D102 - the drivers' methods are named after the events they feed

import attrs
import pytest
from configs import config_of, guard_of
from deltas import delta_of, stored_of
from machines import Driver, of, told

from fsl_async.roles.machine import ClientLeft, Done, Note, SessionLost
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.ps import Merging, ParameterServerMachine
from fsl_async.roles.sync.weighting import TokensWeighting

RUN = "run-1"


def notes(effects):
    """The texts of all notes, one a line."""
    return "\n".join(effect.text for effect in of(effects, Note))


@attrs.define
class ServerDriver(Driver):
    """Drives a parameter server's machine."""

    def recover(self, version=-1, digest="", **more):
        return self.feed(ev.Recovered(version, digest, **more))

    def hello(self, peer, incarnation=1, run=""):
        """Feed a client's hello, and the answer of the disk."""
        effects = self.feed(ev.ClientHello(peer, incarnation, run, -1, ""))
        for admit in of(effects, do.Admit):
            effects = effects + self.feed(Done(admit))
        return effects

    def attach(self, peer, difference=None):
        """Feed a client's model, and the answer of the disk."""
        effects = self.feed(ev.ModelAttached(peer, "f", 10, difference))
        for keep in of(effects, do.KeepShard):
            effects = effects + self.feed(Done(keep))
        return effects

    def join(self, peer, incarnation=1):
        """Feed a client's hello, its model and, if there is a version, that the client holds it."""
        effects = self.hello(peer, incarnation) + self.attach(peer)
        version = self.machine.version
        return effects + (self.hold(peer, version, self.machine.digest) if version >= 0 else [])

    def left(self, peer, incarnation=1, reason="expired"):
        return self.feed(ClientLeft(peer, incarnation, reason))

    def committed(self, version):
        return self.feed(ev.VersionCommitted(version, f"d{version}", 1, 0.1))

    def offer(self, key, *, tokens=8, steps=2, number=None, base_digest=None, peer=None):
        digest = f"d{key.base}" if base_digest is None else base_digest
        number = self.machine.version if number is None else number
        stream = f"delta:{key.text}"
        delta = delta_of(key, tokens, steps, base_digest=digest, number=number)
        return self.receive(msg.DeltaMeta(delta), peer or key.client, stream)

    def store(self, key, *, tokens=8, steps=2, number=None, problem=None, after_s=0.0, norm=1.0):
        number = self.machine.version if number is None else number
        stored = stored_of(key, norm, tokens=tokens, steps=steps, number=number)
        return self.feed(ev.DeltaStored(key.client, stored, problem), after_s)

    def hold(self, peer, version, digest=None):
        return self.receive(msg.Holding(version, digest or f"d{version}"), peer)

    def begin(self, *names):
        """Let clients join an empty run; the first one's weights become version 0."""
        for name in names:
            self.join(name)
        self.receive(msg.InitialMeta("f"), names[0], f"initial:{names[0]}/1")
        self.committed(0)
        for name in names:
            self.hold(name, 0)
        return self


@attrs.define
class ClientDriver(Driver):
    """Drives a client's machine. Every method returns the effects of its event.

    Notes of level info are kept in `notes` instead.
    """

    notes: list = attrs.field(factory=list)

    def feed(self, event, after_s=0.0):
        effects = super().feed(event, after_s)
        plain = [each for each in effects if isinstance(each, Note) and each.level == "info"]
        self.notes += plain
        return [each for each in effects if each not in plain]

    def welcome(self):
        return self.feed(ev.Welcomed(RUN, 0, 4))

    def lose(self, reason="expired"):
        return self.feed(SessionLost(reason))

    def announce(self, version, digest=None):
        return self.receive(msg.Announce(version, digest or f"d{version}"))

    def offered(self, version, kind="update"):
        return self.receive(msg.VersionMeta(kind, version), stream=f"{kind}:{version}")

    def fetched(self, version):
        return self.feed(Done(do.ReceiveVersion("", "update", version)))

    def replaced(self, version, digest=None):
        return self.feed(ev.BaseReplaced(version, digest or f"d{version}"))

    def rebased(self, version):
        return self.feed(ev.Rebased(version))

    def call(self, number, *, last=False):
        return self.receive(msg.Call(number, last))

    def snapshot(self, sequence, base, tokens=8, steps=2):
        return self.feed(ev.Snapshotted(sequence, base, tokens, steps))

    def key(self, sequence, base=0):
        return DeltaKey(self.machine.name, self.machine.incarnation, base, sequence)

    def acknowledge(self, key):
        return self.receive(msg.Accepted(key))

    def refuse(self, key, code="stale"):
        return self.receive(msg.Declined(key, code, "because"))

    def follow(self, version, kind="update"):
        """Fetch an announced version and rebase on it; returns the effects of the last event."""
        self.offered(version, kind)
        self.fetched(version)
        self.replaced(version)
        return self.rebased(version)

    def ready(self, version=0):
        """Join, and train on `version`."""
        self.feed(ev.Attached("f", 10))
        self.welcome()
        self.announce(version)
        self.follow(version, "full")
        return self


@pytest.fixture
def make_server():
    """Make a driven server machine; the arguments are settings, and fields of `Merging`."""

    def make(**given):
        merging = {name: given.pop(name) for name in attrs.fields_dict(Merging) if name in given}
        usual = {"trigger": "clock", "shards": 8, "decay_share": 0.3, "guard": guard_of()}
        config = config_of("sync", **usual | given)
        driver = ServerDriver(
            ParameterServerMachine(config, Merging(**merging), TokensWeighting(), RUN)
        )
        driver.recover()
        return driver

    return make


@pytest.fixture
def server(make_server):
    """A parameter server with the default rules (a call every 600 s)."""
    return make_server()


@pytest.fixture
def client():
    """A client that has not dialed yet."""
    return ClientDriver(ClientMachine("a", 1))


@pytest.fixture
def look():
    """Views of effects: look.sent (messages), look.only (of one class), look.notes (texts)."""
    return attrs.make_class("Look", ["sent", "only", "notes"], frozen=True)(told, of, notes)

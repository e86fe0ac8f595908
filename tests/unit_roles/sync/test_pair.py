"""Machines of a parameter server and clients, connected without a network, under random faults.




A small simulator: training counts, a session is a flag, a stream takes time and may break. Sessions
drop, processes die and disks fill at random, all from one seed. Checked at all times: a delta is
merged at most once, acknowledged deltas are on disk, and the base of a delta is a version of the
run. Checked at the end: once the faults stop, rounds complete, and a drain leaves every client at
the parameter server's version.
"""

# ruff: noqa: D101, D102 - the shell's methods are what their names say

import heapq
import itertools
import random

import attrs
import pytest
from deltas import stored_of

from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    DrainAsked,
    HelloRefused,
    Note,
    Refuse,
    RunEnded,
    Send,
    SessionLost,
    StreamLost,
    TimerFired,
    TrainingEnded,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import SERVER, ClientMachine, ClientRules
from fsl_async.roles.sync.delta import StoredDelta
from fsl_async.roles.sync.ps import ParameterServerMachine, ParameterServerRules
from fsl_async.roles.sync.weighting import TokensWeighting

TO_CLIENT = {
    msg.Publish: lambda m: ev.PublishAsked(),
    msg.Call: lambda m: ev.RoundCalled(m.round, m.last),
    msg.Accepted: lambda m: ev.DeltaAcknowledged(m.key),
    msg.Declined: lambda m: ev.DeltaRefused(m.key, m.code, m.text),
    msg.Announce: lambda m: ev.VersionAnnounced(m.version, m.digest),
    msg.Stop: lambda m: RunEnded(m.reason),
}
TO_SERVER = {
    msg.Fetch: lambda n, m: ev.FetchAsked(n, m.version, m.digest),
    msg.Holding: lambda n, m: ev.VersionHeld(n, m.version, m.digest),
    msg.Skip: lambda n, m: ev.RoundSkipped(n, m.round, m.reason),
}


@attrs.define(eq=False)
class Process:
    """A machine in a process; its planned actions end with it. free_at: its worker is done then."""

    name: str
    machine: object
    alive: bool = True
    free_at: float = 0.0
    done: set = attrs.field(factory=set)
    base: tuple = (-1, "")
    model: tuple = (-1, "")
    trained_since: float = 0.0
    held_since: float | None = None
    kind: str = ""


@attrs.define(eq=False)
class Session:
    client: Process
    server: Process
    up: bool = False
    open: bool = True
    reported: bool = False
    last: dict = attrs.field(factory=dict)


class World:
    def __init__(self, seed, clients):
        self.chance = random.Random(seed)
        self.now, self.heap, self.count, self.faulty = 0.0, [], itertools.count(1), True
        self.digests, self.pending, self.merged, self.versions_of = [], {}, {}, {}
        self.accumulated, self.sessions, self.nodes = set(), {}, {}
        self.launch_server()
        for name in clients:
            self.launch_client(name)

    # --- time, chance, processes ---

    def at(self, process, delay_s, action, *args):
        run = lambda: action(*args) if process.alive else None  # noqa: E731
        heapq.heappush(self.heap, (self.now + delay_s, next(self.count), run))

    def job(self, process, action):
        """Run a job in the process's one worker: in order, with a delay, atomically."""
        process.free_at = max(process.free_at, self.now) + self.chance.uniform(0.01, 0.4)
        self.at(process, process.free_at - self.now, action)

    def fault(self, share):
        return self.faulty and self.chance.random() < share

    def run_until(self, when, limit=400_000):
        while self.heap and self.heap[0][0] <= when:
            self.now, number, action = heapq.heappop(self.heap)
            assert number < limit, "a storm of events"
            action()
        self.now = when

    def launch_server(self):
        rules = ParameterServerRules(every_s=20.0, drain_s=15.0, max_staleness=2, shards=9)
        self.server = Process("ps", ParameterServerMachine(rules, TokensWeighting(), "run"))
        self.accumulated = set()
        settled = dict.fromkeys(self.merged, "merged")
        digests = dict(enumerate(self.digests))
        pending = tuple(stored_of(key, tokens=tokens) for key, tokens in self.pending.items())
        last = len(self.digests) - 1
        digest = self.digests[-1] if self.digests else ""
        self.feed(self.server, ev.Recovered(last, digest, digests, pending, settled, 0))

    def launch_client(self, name):
        process = Process(name, ClientMachine(ClientRules(reoffer_s=2.0), name, next(self.count)))
        process.trained_since = self.now
        self.nodes[name] = process
        self.at(process, 1.0, self.feed, process, ev.Attached("f", 1))
        self.at(process, self.chance.uniform(0, 3), self.dial, process)

    def kill(self, process, launch, *args):
        process.alive = False
        for session in list(self.sessions.values()):
            if process in {session.client, session.server}:
                self.drop(session)
        launch(*args)

    def dial(self, client):
        """Every second, send a hello if there is no session."""
        self.at(client, 1.0, self.dial, client)
        old, machine = self.sessions.get(client.name), client.machine
        mine = old is not None and old.client is client
        if machine.finished or (mine and (old.open or not old.reported)):
            return
        self.sessions[client.name] = Session(client, self.server)
        hello = ev.ClientHello(client.name, machine.incarnation, machine.run, -1, "")
        self.feed(self.server, hello)

    def drop(self, session):
        """Report the loss to both sides after delays, to the parameter server only sometimes."""
        if not session.open:
            return
        session.open = False
        client, server = session.client, session.server
        self.at(client, self.chance.uniform(0, 2), self.report_loss, session)
        left = ClientLeft(client.name, client.machine.incarnation, "cut")
        if not client.alive or self.chance.random() < 0.5:
            self.at(server, self.chance.uniform(0, 0.9), self.left, session, left)

    def report_loss(self, session):
        session.reported = True
        if session.up:
            self.feed(session.client, SessionLost("cut"))

    def left(self, session, event):
        current = self.sessions.get(event.peer)
        if current is session or current.client is not session.client:
            self.feed(session.server, event)

    def deliver(self, session, to, event, delay_s=0.0):
        """Deliver in order within a session and direction, unless the session ends first."""
        when = self.now + delay_s + self.chance.uniform(0.0, 0.3)
        if not delay_s:
            when = session.last[to] = max(when, session.last.get(to, 0.0) + 1e-6)

        arrive = lambda: self.feed(to, event) if session.open else None  # noqa: E731
        self.at(to, when - self.now, arrive)

    def transfer(self, session, receiver, stream, arrived):
        """Run a stream that takes seconds and may break; `arrived` runs at the receiver."""

        def end():
            if not session.open:
                return
            if self.fault(0.1):
                for side, peer in ((session.client, SERVER), (session.server, session.client.name)):
                    self.deliver(session, side, StreamLost(peer, stream, "broken"))
            else:
                arrived()

        self.at(receiver, self.chance.uniform(0.2, 6.0), end)

    # --- machines ---

    def feed(self, process, event):
        if not process.alive:
            return
        carry_out = self.serve if process is self.server else self.act
        for effect in process.machine.handle(event, self.now):
            if not isinstance(effect, Note):
                carry_out(process, effect)
        when = process.machine.next_deadline()
        if when is not None and when not in process.done:
            process.done = {when}
            self.at(process, max(0.0, when - self.now), self.fire, process, when)

    def fire(self, process, when):
        if process.machine.next_deadline() == when:
            self.feed(process, TimerFired())
            after = process.machine.next_deadline()
            assert after is None or after > self.now, "a due deadline stays armed"

    def serve(self, server, effect):
        session = self.sessions.get(getattr(effect, "peer", ""))
        if session is not None and (not session.open or session.server is not server):
            session = None
        client = session.client if session is not None else None
        match effect:
            case do.Admit(peer, incarnation):
                self.job(server, lambda: self.feed(server, ev.Admitted(peer, incarnation)))
            case do.Welcome() if session:
                self.welcome(session)
            case do.KeepShard(peer, incarnation):
                self.job(server, lambda: self.feed(server, ev.ShardKept(peer, incarnation)))
            case Refuse(_, code, text) if session:
                self.deliver(session, client, HelloRefused(code, text))
                self.drop(session)
            case Send(_, message) if session and session.up:
                if isinstance(message, msg.Accepted):
                    key = message.key
                    assert key in self.pending or key in self.merged, "acknowledged and not on disk"
                self.deliver(session, client, TO_CLIENT[type(message)](message))
            case DeclineStream(_, stream, reason) if session:
                self.deliver(session, client, StreamLost(SERVER, stream, reason))
            case do.SendVersion(_, kind, version) if session:
                offered = ev.FetchOffered(f"{kind}:{version}", kind, version, 1)
                self.deliver(session, client, offered)
            case do.ReceiveInitial(_, stream) if session:
                digest = f"own {client.name} {client.machine.incarnation}"
                publish = lambda: self.job(server, lambda: self.commit(0, (), digest))  # noqa: E731
                self.transfer(session, server, stream, publish)
            case do.ReceiveDelta(_, stream) if session:
                store = lambda: self.job(server, lambda: self.store(session, effect))  # noqa: E731
                self.transfer(session, server, stream, store)
            case do.Accumulate(key, _):
                self.job(server, lambda: self.accumulate(key))
            case do.CheckTransfers():
                self.feed(server, ev.TransfersChecked(()))
            case do.Average(version, merged, _):
                digest = f"{self.digests[-1]}+{version}" if len(self.digests) == version else ""
                self.job(server, lambda: self.commit(version, merged, digest))

    def welcome(self, session):
        if session.open:
            session.up = True
            self.deliver(session, session.client, ev.Welcomed("run", 0, 1))

    def store(self, session, effect):
        delta = effect.delta
        if self.fault(0.1):
            lost = StreamLost(effect.peer, f"delta:{delta.key.text}", "disk full")
            self.feed(session.server, lost)
            return
        problem = "NaN" if self.fault(0.03) else None
        if problem is None and delta.key not in self.merged:
            self.pending.setdefault(delta.key, delta.tokens)
        stored = StoredDelta(delta, 1, 1.0)
        self.feed(session.server, ev.DeltaStored(effect.peer, stored, problem))

    def accumulate(self, key):
        assert key in self.pending
        assert key not in self.accumulated, "accumulated twice"
        self.accumulated.add(key)

    def commit(self, version, merged, digest):
        if self.fault(0.15) or (version == 0 and self.digests):
            self.feed(self.server, ev.CommitFailed(version, "disk full"))
            return
        assert version == len(self.digests)
        assert {one.key for one in merged} == self.accumulated
        self.accumulated = set()
        for one in merged:
            assert one.key not in self.merged, "merged twice"
            self.merged[one.key] = self.pending.pop(one.key)
        self.digests.append(digest)
        self.feed(self.server, ev.VersionCommitted(version, digest, 1, 0.1))

    def act(self, client, effect):
        session, server, name = self.sessions.get(client.name), self.server, client.name
        if session is not None and (not session.open or session.client is not client):
            session = None
        match effect:
            case Send(_, message) if session:
                self.deliver(session, server, TO_SERVER[type(message)](name, message))
            case do.SendManifest() if session:
                self.deliver(session, server, ev.ModelAttached(name, "f", 1, None))
            case do.OfferInitial() if session:
                self.deliver(session, server, ev.InitialOffered(name, f"initial:{name}"))
            case do.OfferDelta(delta) if session:
                assert delta.base_digest in {self.digests[delta.key.base], "flipped"}, (
                    "a delta of an unknown base"
                )
                offered = ev.DeltaOffered(name, f"delta:{delta.key.text}", delta)
                self.deliver(session, server, offered)
            case do.ReceiveVersion(stream, kind, version) if session:
                got = lambda: (setattr(client, "kind", kind), self.feed(client, received))  # noqa: E731
                received = ev.FetchReceived(version)
                self.transfer(session, client, stream, got)
            case do.AdoptInitial():
                client.base = (0, f"own {name} {client.machine.incarnation}")
                self.job(client, lambda: self.feed(client, ev.BaseReplaced(*client.base)))
            case do.FinishEncoding(sequence):
                self.job(client, lambda: self.feed(client, ev.EncodingFinished(sequence)))
            case do.ReplaceBase(version):
                self.job(client, lambda: self.replace(client, version))
            case do.TakeSnapshot(sequence, hold):
                self.at(client, self.chance.uniform(0, 2), self.snapshot, client, sequence, hold)
            case do.ResumeTraining():
                assert client.held_since is not None, "no training thread is held"
                client.trained_since += self.now - client.held_since
                client.held_since = None
            case do.CheckTransfers():
                self.feed(client, ev.TransfersChecked(()))
            case do.Rebase():
                self.at(client, self.chance.uniform(0, 2), self.rebase, client)
            case do.EndTraining():
                self.at(client, 0.5, self.end, client)

    def replace(self, client, version):
        right = client.kind == "full" or client.base == (version - 1, self.digests[version - 1])
        assert right, "an update applied to another base"
        if self.fault(0.05):
            self.feed(client, ev.FetchFailed(version, "damaged"))
            return
        client.base = (version, "flipped" if self.fault(0.05) else self.digests[version])
        self.feed(client, ev.BaseReplaced(*client.base))

    def end(self, client):
        client.held_since = self.now if client.held_since is None else client.held_since
        self.feed(client, TrainingEnded(None))

    def snapshot(self, client, sequence, hold):
        since, until = client.trained_since, client.held_since or self.now
        tokens = int(10 * (until - since)) if self.chance.random() < 0.9 else 0
        client.trained_since = until if tokens else since
        if hold and client.held_since is None:
            client.held_since = self.now
        self.feed(client, ev.Snapshotted(sequence, client.model[0], tokens, tokens))

    def rebase(self, client):
        client.model = client.base
        self.feed(client, ev.Rebased(client.model[0]))

    def disturb(self):
        """Cause one random fault."""
        fault = self.chance.random()
        if fault < 0.1:
            self.kill(self.server, self.launch_server)
        elif fault < 0.4:
            name = self.chance.choice(sorted(self.nodes))
            self.kill(self.nodes[name], self.launch_client, name)
        elif self.sessions:
            self.drop(self.sessions[self.chance.choice(sorted(self.sessions))])


@pytest.mark.parametrize("seed", range(150))
def test_after_the_faults_every_client_gets_the_last_version(seed):
    """No sequence of faults may lose or double work, or make a process wait forever."""
    world = World(seed, "abcd"[: 1 + seed % 4])
    for _ in range(40):
        world.run_until(world.now + world.chance.expovariate(1 / 8))
        world.disturb()
    world.faulty = False
    version = len(world.digests)
    world.run_until(world.now + 180.0)
    assert len(world.digests) >= version + 2, "rounds do not complete any more"
    world.feed(world.server, DrainAsked("end of the test"))
    world.run_until(world.now + 90.0)
    assert world.server.machine.ended
    for client in world.nodes.values():
        assert client.machine.finished, "a client does not end with its run"
        assert client.model == (world.server.machine.version, world.digests[-1])

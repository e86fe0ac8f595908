"""A world of parameter servers in a roster, with a fake ring, sessions that break, and crashes.

The machines are the production ones, messages pass through their wire form, and what a store keeps
survives a crash. Weights are whole numbers: a token moves its group's weights by one, and a
reduction adds what the groups gained instead of averaging it. So the global weights are the number
of tokens in decided rounds, and a token that is lost or counted twice shows.
"""

# ruff: noqa: D102 - methods are named after what they do

import hashlib
import heapq
import itertools
import random

import attrs

from fsl_async.roles.machine import Note, Send, TimerFired
from fsl_async.roles.ring import effects as do
from fsl_async.roles.ring import events as ev
from fsl_async.roles.ring import messages as msg
from fsl_async.roles.ring.machine import RingMachine
from fsl_async.roles.ring.rules import RingRules

RUN = "5" * 32


def digest_of(weights):
    """A digest of a whole number."""
    return hashlib.blake2b(str(weights).encode(), digest_size=16).hexdigest()


@attrs.define
class Disk:
    """What survives a crash of one parameter server."""

    theta: int = 0
    tokens: int = 0
    version: int = -1
    round: int = -1
    globals: int = 0
    since: int = -1
    reference: int = 0  # tokens of the group that are in decided rounds
    cut: ev.Cut | None = None
    cut_theta: int = 0
    results: dict = attrs.field(factory=dict)  # attempt -> weights
    held: dict = attrs.field(factory=dict)  # round -> weights received
    decided: ev.Decision | None = None
    attempt: int = 0
    counted: dict = attrs.field(factory=dict)

    @property
    def gained(self):
        return self.round >= 0 and self.tokens > self.reference


class Server:
    """One parameter server: its machine and its disk."""

    def __init__(self, world, name, rules):
        self.world, self.name, self.rules = world, name, rules
        self.disk = Disk()
        self.machine = None
        self.life = 0
        self.holds = False
        self.ring = None
        self.ends = self.ended = False

    @property
    def is_up(self):
        return self.machine is not None

    def start(self):
        self.life += 1
        self.machine = RingMachine(self.rules)
        self.holds, self.ring = False, None
        disk = self.disk
        digest = digest_of(disk.globals) if disk.round >= 0 else ""
        self.feed(
            ev.RingRecovered(
                disk.round, digest, RUN if digest else "", disk.since, disk.gained, disk.cut,
                disk.decided, disk.attempt, dict(disk.counted),
            )
        )  # fmt: skip
        if disk.round < 0 and self.rules.coordinates:
            disk.version, disk.round, disk.since = 0, 0, 0
            disk.decided = ev.Decision(0, 0, digest_of(0), RUN)
            self.feed(ev.Adopted(disk.decided, 0, gained=False))

    def end(self):
        """Merge no more; the run ends here."""
        self.ends = True
        self.feed(ev.GroupEnds())

    def crash(self):
        self.machine = None
        self.world.ring_left(self)

    def train(self, tokens):
        """Merge deltas into a version, unless merges are held."""
        if self.disk.version < 0 or self.holds or self.ends:
            return
        self.disk.theta += tokens
        self.disk.tokens += tokens
        self.disk.version += 1
        self.feed(ev.GroupVersion(self.disk.version))

    def feed(self, event):
        for effect in self.machine.handle(event, self.world.now):
            if self.machine is None:  # a crash in an effect
                return
            self.execute(effect)

    def later(self, seconds, job):
        """Do `job` in this life, after at most `seconds`."""
        life = self.life

        def done():
            if self.is_up and self.life == life:
                job()

        self.world.at(self.world.rng.uniform(0, seconds), done)

    def execute(self, effect):
        world, disk = self.world, self.disk
        match effect:
            case Note():
                world.notes.append(f"{self.name}: {effect.text}")
            case Send(peer, message):
                world.send(self, peer, message)
            case do.TakeCut(number):
                self.holds = True
                self.later(1.0, lambda: self.take_cut(number))
            case do.ResumeMerges():
                self.holds = False
            case do.StartRing(view, rank):
                self.ring = view.attempt
                self.later(0.5, lambda: world.ring_joined(self, view, rank))
            case do.KillRing():
                self.ring = None
                world.ring_left(self)
            case do.KeepAttempt(_, attempt):
                self.later(0.2, lambda: self.keep_attempt(attempt))
            case do.KeepDecision():
                self.later(0.2, lambda: self.keep_decision(effect))
            case do.ReceiveGlobal(number, attempt, digest):
                weights = disk.results.get(attempt)
                if weights is not None and digest_of(weights) == digest:
                    disk.held[number] = weights
                    self.later(0.2, lambda: self.feed(ev.GlobalHeld(number)))
                else:
                    world.send(self, "", msg.FetchGlobal(number, disk.version < 0))
            case do.SendGlobal(peer, _):
                decided = disk.decided
                weights = disk.globals
                if disk.round != decided.round:  # decided, and not adopted here yet
                    weights = disk.results[decided.attempt]
                world.stream(self, peer, decided.round, weights)
            case do.Adopt():
                self.later(1.0, lambda: self.adopt(effect))
            case do.EndGroup():
                assert self.ends
                self.ended = True
            case do.PassAddress():
                pass

    def take_cut(self, number):
        disk = self.disk
        if self.world.faults and self.world.rng.random() < 0.05:
            self.feed(ev.CutFailed(number, "disk full"))
            return
        disk.cut_theta = disk.theta
        digest = digest_of(("cut", disk.theta))
        disk.cut = ev.Cut(number, disk.version, digest, disk.reference, disk.tokens)
        if self.world.crashes(self):
            return
        self.feed(ev.CutTaken(disk.cut))

    def keep_attempt(self, attempt):
        self.disk.attempt = attempt
        if not self.world.crashes(self):
            self.feed(ev.AttemptKept(attempt))

    def keep_decision(self, effect):
        disk, world = self.disk, self.world
        if world.faults and world.rng.random() < 0.05:
            self.feed(ev.LedgerFailed("disk full"))
            return
        world.decide(effect)
        disk.decided = ev.Decision(effect.round, effect.attempt, effect.digest, RUN)
        disk.counted |= dict.fromkeys(effect.contributors, effect.round - 1)
        if not world.crashes(self):
            self.feed(ev.DecisionKept(effect.round, effect.attempt))

    def adopt(self, effect):
        disk, world, made = self.disk, self.world, effect.decision
        if world.faults and world.rng.random() < 0.1:
            self.feed(ev.AdoptFailed(made.round, "disk full"))
            return
        weights = disk.held[made.round]
        assert digest_of(weights) == made.digest == world.digests[made.round]
        reference = disk.cut_theta if effect.counted else disk.globals
        if disk.version < 0:
            disk.theta = reference = 0
            disk.theta = weights
        else:
            disk.theta = weights + disk.theta - reference
        if effect.counted:
            assert disk.cut is not None
            disk.reference = disk.cut.end
        if effect.counted or disk.tokens == disk.reference:
            disk.since = made.round
        disk.version += 1
        disk.globals, disk.round, disk.cut = weights, made.round, None
        disk.results.clear()
        disk.held.clear()
        if not world.crashes(self):
            self.feed(ev.Adopted(made, disk.since, disk.gained))


class World:
    """Time, sessions, the ring and the checks."""

    def __init__(self, seed, members=3, *, faults=True, every=3):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = faults
        self.notes = []
        self.decisions = []
        self.digests = {0: digest_of(0)}
        self.attempts = set()
        self.mixed = 0
        self._jobs = []
        self._count = itertools.count()
        self._reductions = {}
        self._sessions = {}
        self.roster = tuple(f"ps-{number}" for number in range(members))
        self.servers = {
            name: Server(
                self, name, RingRules(name, self.roster, every=every, hold_s=20.0, grace_s=3.0)
            )
            for name in self.roster
        }

    def at(self, seconds, job):
        heapq.heappush(self._jobs, (self.now + seconds, next(self._count), job))

    @property
    def first(self):
        return self.servers[self.roster[0]]

    # --- crashes and sessions ---

    def crashes(self, server):
        """Whether a server dies here, at the worst time: after a write, before its answer."""
        if not self.faults or self.rng.random() >= 0.03:
            return False
        self.crash(server)
        return True

    def crash(self, server):
        server.crash()
        for name in self.roster[1:]:
            if server in (self.servers[name], self.first):
                self.cut_session(name)
        self.at(self.rng.uniform(1, 15), server.start)

    def cut_session(self, name):
        if self._sessions.pop(name, None) is None:
            return
        for server, peer in ((self.servers[name], ""), (self.first, name)):
            if server.is_up:
                server.feed(ev.PeerGone(peer, "lost"))

    def dial(self):
        for name in self.roster[1:]:
            if name in self._sessions or not (self.first.is_up and self.servers[name].is_up):
                continue
            if self.rng.random() < 0.5:
                self._sessions[name] = next(self._count)
                self.servers[name].feed(ev.PeerHere(""))
                if self.first.is_up:
                    self.first.feed(ev.PeerHere(name))

    def send(self, server, peer, message):
        """Deliver in order while the session lives."""
        name = peer or server.name
        session = self._sessions.get(name)
        if session is None:
            return
        target = self.servers[name] if peer else self.first
        wire = msg.to_wire(message)

        def deliver():
            if self._sessions.get(name) == session and target.is_up:
                target.feed(ev.RingMessage("" if peer else name, msg.from_wire(wire)))

        self.at(0.1, deliver)

    def stream(self, server, peer, number, weights):
        session = self._sessions.get(peer)
        target = self.servers[peer]

        def arrive():
            if session is None or self._sessions.get(peer) != session or not target.is_up:
                return
            if self.faults and self.rng.random() < 0.1:
                target.feed(ev.GlobalLost(number, "broke off"))
                return
            target.disk.held[number] = weights
            target.feed(ev.GlobalHeld(number))

        self.at(self.rng.uniform(0.1, 3.0), arrive)

    # --- the ring ---

    def ring_joined(self, server, view, rank):
        if server.ring != view.attempt:
            return
        assert view.members[rank].name == server.name
        assert view.members[rank].digest == server.disk.cut.digest
        here = self._reductions.setdefault(view.attempt, {})
        here[server.name] = server
        names = [share.name for share in view.members]
        if len(here) == len(names):
            del self._reductions[view.attempt]
            self.reduce(view, here)

    def reduce(self, view, here):
        servers = list(here.values())
        base = {server.disk.globals for server in servers}
        assert len(base) == 1, "all begin with the same global weights"
        weights = base.pop() + sum(one.disk.cut_theta - one.disk.globals for one in servers)
        fails = self.faults and self.rng.random() < 0.3
        outcomes = {one.name: not (fails and self.rng.random() < 0.5) for one in servers}
        self.mixed += len(set(outcomes.values())) > 1
        for one in servers:
            one.later(2.0, lambda one=one: self.finish(one, view, weights, ok=outcomes[one.name]))

    def finish(self, server, view, weights, *, ok):
        if server.ring != view.attempt:
            return
        server.ring = None
        if not ok:
            server.feed(ev.RingFailed(view.attempt, "connection reset"))
            return
        server.disk.results[view.attempt] = weights
        if not self.crashes(server):
            server.feed(ev.RingDone(view.attempt, digest_of(weights)))

    def ring_left(self, server):
        """The others of its reduction get an error, sooner or later."""
        for attempt, here in list(self._reductions.items()):
            if here.pop(server.name, None) is not None:
                for other in here.values():
                    other.later(
                        3.0,
                        lambda other=other, attempt=attempt: (
                            other.ring == attempt
                            and other.feed(ev.RingFailed(attempt, "peer closed"))
                        ),
                    )

    # --- checks ---

    def decide(self, effect):
        assert effect.round not in self.digests, "a round is decided once"
        assert effect.attempt not in self.attempts, "no attempt decides twice"
        self.attempts.add(effect.attempt)
        self.digests[effect.round] = effect.digest
        self.decisions.append(effect)
        for name in self.roster:
            end = 0
            for one in self.decisions:
                if name in one.contributors:
                    begin, stop = one.contributors[name]
                    assert begin == end, f"{name}: tokens lost or counted twice"
                    end = stop

    def run(self, seconds):
        end = self.now + seconds
        step = self.now
        while step < end:
            step += 0.5
            self.at(step - self.now, self.turn)
            self.drain(step)

    def drain(self, until):
        while self._jobs and self._jobs[0][0] <= until:
            self.now, _, job = heapq.heappop(self._jobs)
            job()
            self.timers()
        self.now = until
        self.timers()

    def timers(self):
        for server in self.servers.values():
            while server.is_up:
                due = server.machine.next_deadline()
                if due is None or due > self.now:
                    break
                server.feed(TimerFired())

    def turn(self):
        self.dial()
        for server in self.servers.values():
            if server.is_up and self.rng.random() < 0.5:
                server.train(self.rng.randrange(1, 100))
        if not self.faults:
            return
        if self.rng.random() < 0.01:
            up = [one for one in self.servers.values() if one.is_up]
            if up:
                self.crash(self.rng.choice(up))
        if self.rng.random() < 0.02:
            self.cut_session(self.rng.choice(self.roster[1:]))

    def start(self):
        for server in self.servers.values():
            server.start()

    def end_cleanly(self):
        """No faults any more: all come back, and train no more than a little until two rounds."""
        self.faults = False
        self.run(120.0)

"""A run that is killed at chosen effects: production machines, shells and sessions, the real store on a real folder, virtual time.

A point names a role, a class of effects, a stage, and which time it is that it happens:

    before   the machine has decided, nothing is done yet
    after    the shell has done the effect, or given it to its worker
    job      the worker has done a job of that effect, and nobody has heard of it

Jobs that a transport event gives to the worker (a chunk, the end of a stream) stand under the name "transport". At the point its process is
gone: what it planned does not happen, its disk takes nothing more, and keeps what the power model says. A few seconds later it is launched again.

What happened is compared with what the folder says: deltas that clients were told are safe, the frames that they sent, and the
weights of every version, recomputed here from those frames and the ledger by the formulas of the design.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import define, field, frozen
from crash_disk import CrashDisk

import fsl_transport as tp
from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async.events import Attached, DeltaKey
from fsl_async.learn.errors import LearnError
from fsl_async.learn.files import Files
from fsl_async.learn.manifest import Manifest, digest_of
from fsl_async.learn.outer import OuterSettings
from fsl_async.learn.records import StoreSettings
from fsl_async.learn.sealed import unseal
from fsl_async.learn.store import Store
from fsl_async.learn.weighting import weighting_named
from fsl_async.observe.journal import plain
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.client import ClientMachine, ClientRules
from fsl_async.roles.ps import ServerMachine, ServerRules
from fsl_async.roles.round import RoundRules
from fsl_async.shells.client import ClientShell
from fsl_async.shells.ps import RunFacts, ServerShell
from fsl_async.sim.counting import CountingLearner, Model, VirtualWorker
from fsl_async.sim.simulation import ProcessClock
from fsl_codecs import CodecSpec, decode, encode

SERVER = "ps"
CHUNK = 48
MANIFEST = Manifest.from_shapes([("layer.weight", (9, 7)), ("layer.bias", (7,))])
OTHER = Manifest.from_shapes([("other", (70,))])
UP, DOWN = CodecSpec(format="bf16", entropy=False), CodecSpec(format="e4m3", entropy=False)
OUTER = OuterSettings("nesterov", 0.7, 0.9)
ROUNDS, EVERY_S, SHARDS = 4, 12.0, 4
LONGEST_S = 1200.0
RARE_AT_S = 18.0
NOON = 1_800_000_000.0
"""Wall clock at the start of the world, seconds since 1970."""


class Killed(BaseException):
    """Unwinds the call in which a process dies, up to the scheduler."""


class NoJournal:
    """Nobody reads it here: what happened is noted where it happens."""

    def event(self, event, now, cause=None):
        """An event."""
        return 0

    def effect(self, effect, now, cause=None):
        """An effect."""
        return 0


class Scheduler(tp.VirtualScheduler):
    """One that goes on when a process has died in a call."""

    __slots__ = ()

    def run_until(self, when):
        """Run on after every death."""
        while True:
            try:
                super().run_until(when)
            except (Killed, SystemExit):
                continue
            return


@frozen
class Point:
    """Where a process dies: at the `nth` time."""

    role: str
    name: str
    stage: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.role}:{self.stage}:{self.name}:{self.nth}"


class Points:
    """Counts how often each point is passed, and kills at the one that is armed."""

    def __init__(self, armed: Point | None) -> None:
        self.armed = armed
        self.passed: Counter[tuple[str, str, str]] = Counter()
        self.fired = False
        self.doing = ""

    def reach(self, role: str, name: str, stage: str, kill: Callable[[], None]) -> None:
        """A point is passed."""
        self.passed[role, name, stage] += 1
        point = self.armed
        if (
            point is None
            or self.fired
            or (point.role, point.name, point.stage) != (role, name, stage)
        ):
            return
        if self.passed[role, name, stage] == point.nth:
            self.fired = True
            kill()
            raise Killed(str(point))

    def watch(self, node: Any, role: str, kill: Callable[[], None]) -> None:
        """Put points around the effects of a node."""
        execute = node._execute

        def run(effect: do.Effect, number: int) -> None:
            name = type(effect).__name__
            self.reach(role, name, "before", kill)
            self.doing = name
            try:
                execute(effect, number)
            finally:
                self.doing = ""
            self.reach(role, name, "after", kill)

        node._execute = run

    def all(self) -> list[Point]:
        """Every point that was passed, each time."""
        return [
            Point(*place, nth)
            for place, times in sorted(self.passed.items())
            for nth in range(1, times + 1)
        ]


class WatchedWorker(VirtualWorker):
    """A worker with a point behind every job."""

    def __init__(self, clock, cost_s, points, role, kill):
        super().__init__(clock, cost_s)
        self.points, self.role, self.kill = points, role, kill

    def submit(self, job, done, failed):
        """As the virtual worker, and perhaps the end."""
        name = self.points.doing or "transport"

        def watched():
            result = job()
            self.points.reach(self.role, name, "job", self.kill)
            return result

        super().submit(watched, done, failed)


class VectorLearner(CountingLearner):
    """A client whose base is a real vector and whose deltas are real frames; what a delta holds follows from its key alone."""

    def __init__(self, world, name, incarnation, clock, on_event, *, step_s, manifest=MANIFEST):
        super().__init__(clock, on_event, step_s=step_s, tokens_per_step=64, initial=0)
        self.world, self.name, self.incarnation = world, name, incarnation
        self.own_manifest = manifest
        self.vector = np.zeros(manifest.values, np.float32)
        self.initial = self.random("initial", 1.0)
        world.truth.initials.append(self.initial)

    def random(self, what, size):
        """Values that follow from the name, the life and `what`."""
        seed = [ord(c) for c in f"{self.name}/{self.incarnation}/{what}"]
        values = np.random.default_rng(seed).standard_normal(self.own_manifest.values)
        return (size * values).astype(np.float32)

    def attach(self):
        """The training function has built its model."""
        self.manifest = self.own_manifest
        self._on_event(Attached(self.manifest.fingerprint, self.manifest.values))

    def encode_initial(self, index):
        """A chunk of this life's own weights."""
        return encode(chunks(self.initial)[index], CodecSpec())

    def adopt_initial(self):
        """They are version 0."""
        self.vector = self.initial
        self.base = Model(0, 0, digest_of(self.initial))
        return self.base.digest

    def encode_delta(self, sequence, index):
        """A chunk of a delta."""
        if sequence not in self._deltas:
            raise LearnError(f"delta {sequence} was dropped")
        frame = encode(chunks(self.random(sequence, 0.1))[index], UP)
        model, tokens = self._deltas[sequence]
        key = (self.name, self.incarnation, sequence)
        self.world.truth.sends(key, index, frame, model, tokens)
        return frame

    def finish_fetch(self, version):
        """Make the base the fetched version."""
        kind, fetched, frames = self._fetch
        assert fetched == version, "what was fetched is applied"
        arrived = np.concatenate([decode(frame) for frame in frames])
        self.vector = arrived if kind == "full" else self.vector + arrived
        self.base = Model(version, 0, digest_of(self.vector))
        self._fetch = None
        self.world.truth.holds(self.name, version, self.base.digest)
        return self.base.digest


def chunks(vector):
    """A vector as the frames have it."""
    return [vector[start : start + CHUNK] for start in range(0, len(vector), CHUNK)]


@define
class Truth:
    """What the world outside the server's folder saw."""

    frames: dict[tuple[str, int, int], dict[int, bytes]] = field(factory=dict)
    sent: dict[tuple[str, int, int], tuple[Model, int]] = field(factory=dict)
    told: dict[str, None] = field(
        factory=dict
    )  # keys that a client was told, or was being told, are safe
    held: dict[int, set[str]] = field(factory=dict)
    shards: dict[str, set[int]] = field(factory=dict)
    initials: list[np.ndarray] = field(factory=list)  # what each life would have published
    problems: list[str] = field(factory=list)

    def sends(self, key, index, frame, model, tokens):
        """A delta's chunk leaves a client."""
        if self.sent.setdefault(key, (model, tokens)) != (model, tokens):
            self.problems.append(f"delta {key} was recomputed")
        if self.frames.setdefault(key, {}).setdefault(index, frame) != frame:
            self.problems.append(f"chunk {index} of delta {key} was coded anew")

    def holds(self, name, version, digest):
        """A client has a version."""
        self.held.setdefault(version, set()).add(digest)


class World:
    """One run to its end. `violations` says what was wrong."""

    def __init__(
        self,
        root,
        *,
        point=None,
        power=None,
        disk=None,
        wall=lambda _seconds, _launch: 0.0,
        conditions=None,
        trigger="clock",
        rounds=ROUNDS,
        extras=True,
    ):
        """power: what a crash of the server leaves, as `CrashDisk.bury` has it. disk: makes the first disk of the server.
        wall: what is added to the wall clock, from the virtual time and the number of the launch.
        """
        self.root, self.run_dir = root, root / "run"
        self.points = Points(point)
        self.power = power
        self.wall = wall
        self.trigger, self.rounds, self.extras = trigger, rounds, extras
        self.scheduler = Scheduler()
        self.network = tp.MemNetwork(self.scheduler, 7, conditions or tp.Conditions(delay_s=0.02))
        self.truth = Truth()
        self.alive: dict[str, tuple[ProcessClock, Any, Any]] = {}
        self.launches: Counter[str] = Counter()
        self.finishes: dict[str, list[do.Finish]] = {}
        self.violations: list[str] = []
        self.store = None
        self._first_disk = disk
        self.disk = None
        self.over = False
        self.dead_end = ""
        self.doubted = False

    # --- processes ---

    def now(self, launch):
        """Wall clock of a process."""
        return NOON + self.scheduler.time() + self.wall(self.scheduler.time(), launch)

    def _worker(self, clock, role, name):
        chance = random.Random(f"{name}/{self.launches[name]}")
        kill = lambda: self.kill(name)  # noqa: E731
        return WatchedWorker(clock, lambda: chance.uniform(0.001, 0.02), self.points, role, kill)

    def kill(self, name):
        """As kill -9 does it."""
        clock, _, _ = self.alive.pop(name)
        clock.alive = False
        self.network.kill(name)
        if name == SERVER:
            self.disk.dead = True
        launch = self.launch_server if name == SERVER else lambda: self.launch_client(name)
        self.scheduler.call_at(self.scheduler.time() + 3.0, launch)

    def launch_server(self):
        """On what the folder holds."""
        if self.store is not None:
            self.disk.bury(self.power)
        make = self._first_disk or CrashDisk
        self._first_disk = None
        self.launches[SERVER] += 1
        launch = self.launches[SERVER]
        self.disk = make(self.root)
        settings = StoreSettings(keep_versions=2, codec_down=DOWN, outer=OUTER)
        self.store = store = Store(
            self.run_dir,
            settings,
            files=self.disk,
            wall_clock=lambda: self.now(launch),
            clock=self.scheduler.time,
        )
        clock = ProcessClock(self.scheduler)
        rules = ServerRules(
            trigger=self.trigger,
            every_s=EVERY_S,
            limit_rounds=self.rounds,
            round=RoundRules(0.5, 4.0, 1.0, 3.0),
            keep_versions=2,
            drain_s=5.0,
        )
        machine = ServerMachine(rules, weighting_named("tokens"), "crash")
        self.alive[SERVER] = (clock, None, None)
        try:
            recovered = self._patiently(store.recover)
            self._patiently(lambda: store.start_run("crash"))
        except SystemExit:
            self.kill(SERVER)
            return
        except LearnError as error:
            self.dead_end = f"the server cannot be started again: {error}"
            return
        shell = ServerShell(
            machine,
            RunFacts("crash", SHARDS, {}),
            store,
            worker=self._server_worker(clock),
            scheduler=clock,
            journal=NoJournal(),
            say=lambda _: None,
            finished=lambda finish: self._finished(SERVER, finish),
        )
        self._tap(shell, machine)
        self.points.watch(shell.node, "ps", lambda: self.kill(SERVER))
        shell.endpoint = endpoint = tp.ListenerEndpoint(
            self.network.listener(SERVER),
            clock,
            tp.TransportSettings(heartbeat_every_s=1.0, expire_after_s=4.0),
            shell.on_transport,
            SERVER,
            incarnation=int(self.now(launch) * 1e9),
            chance=random.Random(f"{SERVER}/{launch}"),
        )
        self.alive[SERVER] = (clock, endpoint, shell)
        shell.start(recovered)

    def _patiently(self, act):
        """As whoever starts a server does it: a disk that is full now is not full for ever."""
        for _ in range(12):
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - the last one counts
                last = error
        raise last

    def _server_worker(self, clock):
        worker = self._worker(clock, "ps", SERVER)
        run = worker._run

        def guarded(job, done, failed):
            try:
                run(job, done, failed)
            except SystemExit:  # the disk killed it in the middle of a call
                if SERVER in self.alive:
                    self.kill(SERVER)
                raise

        worker._run = guarded
        return worker

    def _tap(self, shell, machine):
        """Note what the server tells clients."""
        handle = machine.handle

        def noted(event, now):
            effects = handle(event, now)
            for effect in effects:
                if isinstance(effect, do.Tell) and type(effect.message).__name__ == "Accepted":
                    self.truth.told[effect.message.key] = None
            return effects + self._second_thoughts(effects, now) + self._rare_effects(machine, now)

        machine.handle = noted

    def _second_thoughts(self, effects, now):
        """A delta that is put aside as odd and taken back at once, as a median of norms may have it; once."""
        counted = next((one for one in effects if isinstance(one, do.Accumulate)), None)
        if not self.extras or counted is None or self.doubted:
            return []
        self.doubted = True
        return [do.Quarantine(counted.key, "odd", held=True), do.Release(counted.key), counted]

    def _rare_effects(self, machine, now):
        """What a server wants in odd moments only, once: a stream that nobody asked for, the end of a session."""
        if not self.extras or now < RARE_AT_S or machine.version < 0 or "a" not in machine.members:
            return []
        self.extras = False
        return [
            do.Serve("a", "full", machine.version),
            do.Dismiss("bb", "not a member"),
            do.LookAtTransfers(),
        ]

    def launch_client(self, name):
        """A new life of a client."""
        self.launches[name] += 1
        launch = self.launches[name]
        clock = ProcessClock(self.scheduler)
        incarnation = int(self.now(launch) * 1e9)
        machine = ClientMachine(ClientRules(), name, incarnation)
        if name == "stray":
            machine.run = "elsewhere"
        chance = random.Random(f"{name}/{launch}")
        learner = VectorLearner(
            self,
            name,
            incarnation,
            clock,
            lambda event: shell.node.feed(event),  # noqa: PLW0108 - shell comes next
            step_s=0.3 + 0.1 * (len(name) % 3),
            manifest=OTHER if name == "odd" else MANIFEST,
        )
        handle = machine.handle

        def noted(event, now):
            if isinstance(event, ev.DeltaAcknowledged):
                self.truth.told[event.key.text] = None
            if isinstance(event, ev.Welcomed):
                self.truth.shards.setdefault(name, set()).add(event.shard)
                learner.incarnation = event.incarnation
            looks = [do.LookAtTransfers()] if isinstance(event, ev.Preempting) else []
            return handle(event, now) + looks

        machine.handle = noted
        shell = ClientShell(
            machine,
            learner,
            worker=self._worker(clock, "client", name),
            scheduler=clock,
            journal=NoJournal(),
            say=lambda _: None,
            finished=lambda finish: self._finished(name, finish),
            welcomed=lambda _: None,
            end_training=lambda _: learner.stop(),
        )
        self.points.watch(shell.node, "client", lambda: self.kill(name))
        shell.endpoint = endpoint = tp.DialerEndpoint(
            self.network.dialer(name, SERVER),
            clock,
            tp.TransportSettings(heartbeat_every_s=1.0, expire_after_s=4.0),
            shell.on_transport,
            name,
            incarnation=incarnation,
            chance=chance,
        )
        self.alive[name] = (clock, endpoint, shell)
        shell.dial()
        clock.call_at(clock.time() + 0.5, learner.attach)

    def _finished(self, name, finish):
        self.finishes.setdefault(name, []).append(finish)
        if name == SERVER:
            if finish.exit_code:  # its launcher starts it again
                self.scheduler.call_at(self.scheduler.time(), self._end, SERVER, True)
            else:
                self.over = True
            return
        self.scheduler.call_at(
            self.scheduler.time() + 0.2, self._end, name, finish.exit_code in {1, 64}
        )

    def _end(self, name, again):
        """A process ends by itself."""
        if name not in self.alive:
            return
        if again:
            self.kill(name)
            return
        clock, _, _ = self.alive.pop(name)
        clock.alive = False
        self.network.kill(name)

    def preempt(self, name):
        """Say to a client that it will be ended."""
        if name in self.alive:
            clock, _, shell = self.alive[name]
            shell.node.feed(ev.Preempting(clock.time() + 15.0, "the test"))

    # --- the run ---

    def run(self):
        """Play it to its end and check everything."""
        at = self.scheduler.call_at
        at(0.0, self.launch_server)
        for position, name in enumerate(("a", "bb", "ccc")):
            at(0.3 + 0.4 * position, self.launch_client, name)
        if self.extras:
            at(8.0, self.launch_client, "odd")
            at(9.0, self.launch_client, "stray")
            at(20.0, self.preempt, "ccc")
        while not (self.over or self.dead_end) and self.scheduler.time() < LONGEST_S:
            self.scheduler.run_until(self.scheduler.time() + 1.0)
        self.scheduler.run_until(self.scheduler.time() + 30.0)
        self.violations = [self.dead_end] if self.dead_end else self.check()
        return self

    def close(self):
        """Take the folder away."""
        if self.disk is not None:
            self.disk.dead = False
            self.disk.bury()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # --- what must hold ---

    def check(self):
        """Sentences about what does not hold."""
        found = list(self.truth.problems)
        if not self.over:
            found.append("the run did not come to its end")
        if self.store is not None:
            self.disk.dead, self.disk.at, self.disk.die_after = False, 0, None
            self.store.close()
            self.disk.bury()
        lines = [
            {"type": "Tell", "message": {"type": "Accepted", "key": key}} for key in self.truth.told
        ]
        journal = self.run_dir / "journal.jsonl"
        journal.write_text("".join(json.dumps(plain(line)) + "\n" for line in lines))
        audit = audit_run(self.run_dir)
        found += audit.complaints()
        facts = [unseal(line) for line in (self.run_dir / "ledger.jsonl").read_bytes().splitlines()]
        found += self._check_settled(facts) if self.over else []
        found += self._check_weights(facts)
        found += self._check_leases(facts)
        found += self._check_recovery(facts)
        # One more for a delta that was on its way when the last round was merged: what is acknowledged is merged.
        if self.over and not self.rounds <= audit.versions <= self.rounds + 1:
            found.append(f"{audit.versions} versions were made, {self.rounds} were asked for")
        return found

    def _check_settled(self, facts):
        """At the end of a run what a client was told is safe is in a version, or aside on record."""
        settled = {entry["key"] for fact in facts for entry in fact.get("merged", ())}
        settled |= {fact["key"] for fact in facts if fact["fact"] == "quarantined"}
        return [
            f"{key} was acknowledged, and is in no version"
            for key in self.truth.told
            if key not in settled
        ]

    def _check_weights(self, facts):
        """Recompute every version from what clients sent."""
        found = []
        versions = [fact for fact in facts if fact["fact"] == "version"]
        accepted = {fact["key"]: fact for fact in facts if fact["fact"] == "accepted"}
        digests = {fact["version"]: fact["digest"] for fact in versions}
        if [fact["version"] for fact in versions] != list(range(len(versions))):
            found.append(f"versions {[fact['version'] for fact in versions]} are no lineage")
        weights = self._initial(versions[0]["digest"]) if versions else None
        if versions and weights is None:
            return [*found, "version 0 is nobody's weights"]
        momentum = np.zeros(MANIFEST.values, np.float32)
        residual = np.zeros_like(momentum)
        rate, coefficient = np.float32(OUTER.learning_rate), np.float32(OUTER.momentum)
        for fact in versions[1:]:
            total = np.zeros_like(momentum)
            for entry in fact["merged"]:
                key = DeltaKey.parse(entry["key"])
                life = (key.client, key.incarnation, key.sequence)
                if life not in self.truth.sent or entry["key"] not in accepted:
                    return [*found, f"{entry['key']} was never sent, or never accepted"]
                model, tokens = self.truth.sent[life]
                if entry["tokens"] != tokens:
                    found.append(f"{entry['key']} has {entry['tokens']} tokens, not {tokens}")
                base = accepted[entry["key"]]["base_digest"]
                if model.version != key.base or base != digests[key.base]:
                    found.append(f"{entry['key']} names another base than it was computed from")
                arrived = np.concatenate([decode(self.truth.frames[life][i]) for i in range(2)])
                total = total + np.float32(entry["weight"]) * arrived
            average = total * np.float32(fact["scale"])
            momentum = coefficient * momentum + average
            desired = -rate * (average + coefficient * momentum) + residual
            sent = np.concatenate([decode(encode(c, DOWN)) for c in chunks(desired)])
            residual = desired - sent
            weights = weights + sent
            if digest_of(weights) != fact["digest"]:
                found.append(f"version {fact['version']} holds other weights than its deltas give")
        for version, held in self.truth.held.items():
            if held != {digests.get(version)}:
                found.append(
                    f"clients held {held} as version {version}, the ledger has {digests.get(version)}"
                )
        return found

    def _initial(self, digest):
        return next((one for one in self.truth.initials if digest_of(one) == digest), None)

    def _check_leases(self, facts):
        found = [
            f"{name} was given shards {sorted(shards)}"
            for name, shards in self.truth.shards.items()
            if len(shards) > 1 and name != "odd"
        ]
        kept = {
            name: shards
            for name, shards in self.truth.shards.items()
            if name not in {"odd", "stray"}
        }
        taken = Counter(shard for shards in kept.values() for shard in shards)
        return found + [
            f"shard {shard} was given to {n} clients" for shard, n in taken.items() if n > 1
        ]

    def _check_recovery(self, facts):
        """A new process finds what the last one left, with nothing to repair."""
        store = Store(
            self.run_dir,
            StoreSettings(keep_versions=2, codec_down=DOWN, outer=OUTER),
            files=Files(),
        )
        recovered = store.recover()
        store.close()
        last = max((fact["version"] for fact in facts if fact["fact"] == "version"), default=-1)
        # What a full disk left of an old version goes at the next start; nobody misses it.
        odd = [notice for notice in recovered.notices if "tmp-pruned" not in notice]
        told = [f"the next start says: {notice}" for notice in odd]
        return (
            told
            if recovered.version == last
            else [*told, f"the next start is at {recovered.version}, not {last}"]
        )

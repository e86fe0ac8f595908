"""A simulated run whose processes are killed at chosen effects, or in a call to the disk.

`Simulation` with crash points around all effects, a journal for each process, effects that seldom
occur, and a disk that keeps what the power model leaves. A point is a role, a class of effects, a
stage, and the count of its occurrence:

    before   the machine has decided, nothing is done yet
    after    the shell has executed the effect, or submitted it to its worker
    job      the worker has done a job of that effect, and has not reported it

A few seconds after its death a process is launched again. `found` has the violations: those of
`Invariants`, of the journals, of the audit of the run directory, and of the next start.
"""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from attrs import evolve, field, mutable
from crash_journal import CrashJournal, check_journals
from crash_point import Points, Scheduler, WatchedWorker
from secure_simulation import SecureSites

import fsl_transport as tp
from fsl_async.files.memory_files import Faults, Killed, MemoryFiles
from fsl_async.nodes.ps.node import store_settings_of
from fsl_async.observe.ledger_audit import JOURNAL, audit_run
from fsl_async.roles.machine import EndSession, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.progress import Decay
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.tools.sim import tune_simulation as sim
from fsl_async.tools.sim.invariants import Invariants
from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings
from fsl_async.tools.sim.simulation import NOON, Simulation
from fsl_async.tools.sim.training import MANIFEST
from fsl_async.tools.sim.world import World

POWERS = (None, "names", "all", 1, 2)
"""The part of the disk that the parameter server's death leaves: everything (None, kill -9), or the
rest after a power cut at best, at worst, and by two seeds.
"""
KINDS = {
    "clock": ("called", []),
    # From disk to disk: no version is held in memory.
    "rounds": ("called", ["sync.trigger=rounds"]),
    "rough": ("called", []),
    "buffer": ("steps", ["sync.buffer=2", "sync.local_steps=4"]),
    "latest": ("own", ["sync.buffer=1", "run.rounds=6"]),
}
if importlib.util.find_spec("cryptography"):
    KINDS["secure"] = ("called", [*sim.SETTINGS["secure"], "sync.clients=3"])
"""Kind of a run -> pace of its clients, settings."""
CUTS = (("c0001", 17.0, 26.0), ("c0000", 30.0, 33.0), ("c0000", 49.0, 51.0))
"""Cuts of "rough": client, from second, to second."""
SETTINGS = ["run.rounds=4", "sync.max_staleness=4", "data.shards=4"]
OTHER = Manifest.from_shapes([("other", (7,))], buffers=[("buffers", (2,))])
EVERY_S, RETURN_S, RARE_AT_S, LONGEST_S = 12.0, 3.0, 30.0, 1200.0
PROFILE = FaultProfile(delay_s=0.02, server_return_s=(RETURN_S, RETURN_S))
SLOW = tp.Conditions(
    delay_s=0.2, jitter_s=0.1, drop=0.02, duplicate=0.02, reorder=0.05, bytes_per_s=9000.0
)


@mutable
class CrashInvariants(Invariants):
    """Invariants whose reads of the parameter server's disk are none of its calls."""

    faults: Faults = field(factory=Faults)
    """Calls to the parameter server's disk."""

    def _check_new_versions(self):
        reads, self.faults.reads = self.faults.reads, False
        super()._check_new_versions()
        self.faults.reads = reads


class CrashRun(Simulation):
    """One run to its end. `found` has one sentence for each violation."""

    def __init__(
        self, kind, root, *, point=None, power=None, faults=(), threads=1, wall=lambda *_: 0.0
    ):
        """Prepare a run.

        root: an existing folder for the run directory. power: see `POWERS`. faults: of the disk,
        for each launch of the parameter server. threads: of its store; with several, the order of
        the disk's calls differs from run to run. wall: seconds added to the wall clock, from the
        virtual time and the number of the launch.
        """
        self.kind, self.root, self.power, self.wall = kind, root, power, wall
        self.extras = kind == "clock"
        self.points = Points(point)
        self.faults, self.threads = faults or (Faults(),), threads
        self.journals: dict[Path, list[CrashJournal]] = {}
        self.launches: Counter[str] = Counter()
        self.shards: dict[str, set[int]] = {}
        self.over = False
        self.found: list[str] = []
        self._launching = ""
        settings = SimulationSettings(
            3, seed=7, faults=PROFILE, every_s=EVERY_S, keep_versions=2, pace=KINDS[kind][0],
            latest=kind == "latest",
        )  # fmt: skip
        world = World(PROFILE, settings.seed)
        world.scheduler = Scheduler()
        conditions = SLOW if kind == "rough" else world.conditions
        world.network = tp.MemNetwork(world.scheduler, settings.seed, conditions)
        super().__init__(settings, world=world, config=settings.config(*SETTINGS, *KINDS[kind][1]))
        self.invariants = CrashInvariants(self.invariants.lineage, self.world.violated)

    # --- processes ---

    def now(self, launch):
        """Return the wall clock of a process."""
        return NOON + self.scheduler.time() + self.wall(self.scheduler.time(), launch)

    def _path(self, name):
        """Return where an audit finds a process's journal."""
        return self.root / ("" if name == self.server else f"clients/{name}") / JOURNAL

    def _begin_process(self, name, **more):
        self.launches[name] += 1
        self._launching, launch = name, self.launches[name]
        path = self._path(name)
        self.journal = CrashJournal(path, self.scheduler, lambda: self.now(launch), **more)
        self.journals.setdefault(path, []).append(self.journal)

    def _next_incarnation(self, name):
        return int(self.now(self.launches[self._launching]) * 1e9)

    def _worker(self, clock, name):
        chance = random.Random(f"{name}/{self.launches[name]}")
        is_server = name == self.server
        return WatchedWorker(
            clock,
            lambda: chance.uniform(0.001, 0.02),
            self.points,
            "ps" if is_server else "client",
            lambda: self.die(name),
            faults=self.invariants.faults if is_server else None,
        )

    def _launch_server(self):
        faults, launch = self.invariants.faults, self.launches[self.server]
        if launch < len(self.faults):
            faults = self.faults[launch]
        elif faults.mode != "error" or faults.die_after:  # a disk may stay full over launches
            faults = Faults()
        faults.dead = False
        self.invariants.faults = faults
        self._begin_process(self.server, faults=faults, killed=self._server_is_dead)
        try:
            super()._launch_server()
        except Killed:
            self._server_is_dead()

    def _store(self, clock):
        self._files.faults, launch = self.invariants.faults, self.launches[self.server]
        settings = store_settings_of(self.config)
        return Store(
            self.run_dir,
            evolve(settings, threads=self.threads),
            files=self._files,
            wall_clock=lambda: self.now(launch),
            clock=self.scheduler.time,
            later=lambda write: clock.call_at(clock.time() + 3.0, self._in_server, write),
        )

    def _prepare(self, clock, shell, store, number):
        self.store = store
        machine, journal = shell.machine, self.journal
        handle = machine.handle

        def noted(event, now):
            effects = handle(event, now)
            is_new = (
                isinstance(event, ev.DeltaStored) and event.stored.key in machine.deltas.pending
            )
            new = event.stored.key if is_new else None
            for message in (one.message for one in effects if isinstance(one, Send)):
                if message.tag == "accepted/1":
                    journal.acknowledges(message.key, now)
                # After the last call clients wait, in runs without rounds too, and end.
                self._ending = self._ending or getattr(message, "last", False)
            self._ending = self._ending or machine.end.asked
            return effects + self._rare_effects(machine, new, now)

        machine.handle = noted
        self.points.watch(shell.node, "ps", lambda: self.die(self.server))

    def _rare_effects(self, machine, new, now):
        """Return effects that seldom occur, once each: a delta that is quarantined and released, an
        unrequested stream, the end of a session, a check of the own files. new: a pending delta.
        """
        if self.extras and new is not None:
            self.extras = False
            self.rare_at = now + RARE_AT_S
            return [do.Quarantine(new, "odd", held=True), do.Release(new)]
        if self.kind != "clock" or self.extras or now < self.rare_at or not machine.members:
            return []
        if any(one.version != machine.version for one in machine.members.values()):
            return []  # a client that fetches mixes it with an unrequested one, and fetches again
        self.rare_at = LONGEST_S
        limits = machine.progress.limits
        return [
            do.SendVersion("c0000", "full", machine.version),
            EndSession("c0001", "not a member"),
            do.CheckTransfers(),
            do.VerifyVersion(machine.version),
            do.KeepDecay(Decay(0.9, limits, limits)),
        ]

    def _launch_client(self, name):
        self._begin_process(name)
        self.manifest = OTHER if name == "odd" else MANIFEST
        super()._launch_client(name)
        self.manifest = MANIFEST
        process, journal = self.processes[name], self.journal
        machine = process.shell.machine
        if name == "stray":
            machine.run = "elsewhere"
        handle = machine.handle

        def noted(event, now):
            if event.topic is msg.Accepted:
                journal.acknowledges(event.message.key, now)
            if isinstance(event, ev.Welcomed):
                self.shards.setdefault(name, set()).add(event.shard)
            looks = [do.CheckTransfers()] if isinstance(event, ev.Preempting) else []
            return handle(event, now) + looks

        machine.handle = noted
        self.points.watch(process.shell.node, "client", lambda: self.die(name))

    # --- ends ---

    def die(self, name):
        """Kill a process as kill -9 does; a few seconds later it is launched again."""
        if name == self.server:
            self._server_is_dead()
        elif self._kill(name):
            self._at(RETURN_S, self._launch_client, name)

    def _kill(self, name):
        cut = name == self.server and self.power is not None
        if not super()._kill(name):
            return False
        self.journals[self._path(name)][-1].die(self.scheduler.time(), cut=cut)
        if name == self.server and self.store._parts is not None:
            self.store._parts.run.pool.close()
        if cut:
            self.disk.lose_power(self.power)
        return True

    def _server_finished(self, finish):
        super()._server_finished(finish)
        self.over = not finish.exit_code

    def _client_finished(self, name, finish):
        """Close the link in order, then end; launch a client again that failed or is preempted."""
        self._at(0.2, self._exit, name, self.processes[name], finish)

    def _exit(self, name, process, finish):
        if self.processes.get(name) is not process:
            return
        self.journals[self._path(name)][-1].close()
        if process.shell.machine.shutdown.exit_code in {1, 64}:
            self.die(name)
        else:
            super()._client_finished(name, finish) if name in self.names else self._kill(name)

    # --- the run ---

    def begin(self):
        """Launch all processes; in a run with rare effects also two that are refused."""
        at = self.scheduler.call_at
        at(0.0, self._launch_server)
        for position, name in enumerate(self.names):
            at(0.3 + 0.4 * position, self._launch_client, name)
        if self.extras:
            at(8.0, self._launch_client, "odd")
            at(9.0, self._launch_client, "stray")
            at(35.0, self._preempt, "c0002")
        for name, begin, end in CUTS if self.kind == "rough" else ():
            at(begin, self.network.cut, name, self.server)
            at(end, self.network.heal, name, self.server)

    def _preempt(self, name):
        if name in self.processes:
            shell = self.processes[name].shell
            shell.node.feed(ev.Preempting(self.scheduler.time() + 15.0, "the test"))

    def run(self):
        """Run to the end, and check everything."""
        self.begin()
        while not (self.over or self.violations) and self.scheduler.time() < LONGEST_S:
            self.scheduler.run_until(self.scheduler.time() + 1.0)
        self.scheduler.run_until(self.scheduler.time() + 30.0)
        self.found = self.violations or list(self._check())
        return self

    def _check(self):
        missed = [one.at for one in self.faults if one.at and not one.fired]
        if missed or (self.points.armed and not self.points.fired):
            yield f"{self.points.armed or missed} was not reached"
        if not self.over:
            yield "the run did not come to its end"
        if self.invariants.store is None:
            return
        self.invariants.run_ended({}, [])
        yield from self.violations
        self._files.faults = Faults()
        self.store.close()
        for path, journals in self.journals.items():
            yield from check_journals(path, journals)
        self.disk.write_to(self.root, self.run_dir)
        audit = audit_run(self.root)
        yield from audit.complaints()
        # A delta in flight when the last round is merged makes one more version.
        if not 0 <= audit.versions - self.config.run.rounds <= 1:
            yield f"{audit.versions} versions were made"
        for name, shards in self.shards.items():
            if len(shards) > 1 and name != "odd":
                yield f"{name} was given shards {sorted(shards)}"
        given = Counter(shard for name in self.names for shard in self.shards.get(name, ()))
        yield from (
            f"shard {shard} was given to {n} clients" for shard, n in given.items() if n > 1
        )
        yield from self._check_next_start()

    def _check_next_start(self):
        """Check that a new process recovers the last version and has nothing to repair."""
        settings = evolve(store_settings_of(self.config), threads=1)
        store = Store(self.run_dir, settings, files=MemoryFiles(self.disk))
        recovered, last = store.recover(), self.invariants.lineage.version
        # The next start removes what a full disk left of an old version; that is no damage.
        for notice in store.notices:
            if "tmp-pruned" not in notice:
                yield f"the next start reports: {notice}"
        store.close()
        if recovered.version != last:
            yield f"the next start is at {recovered.version}, not {last}"


class SecureCrashRun(SecureSites, CrashRun):
    """A run with secure sums, whose sites are audited."""

    def __init__(self, *given, **options):
        """See `CrashRun`."""
        super().__init__(*given, **options)
        self.watch_sites()

    def _check(self):
        yield from super()._check()
        yield from self.audit.problems()


@contextmanager
def folder():
    """A folder, in memory where there is some: thousands of small files on a disk take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def play(kind, **options):
    """Run with these options of `CrashRun`; return the run, without its folder."""
    with folder() as root:
        run = SecureCrashRun if kind == "secure" else CrashRun
        return run(kind, root, **options).run()


def passed(kind, **options):
    """Run without a crash, which must find no violation."""
    run = play(kind, **options)
    assert run.found == [], run.found
    return run

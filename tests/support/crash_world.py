"""A run whose processes are killed at chosen effects.

Production machines, shells and sessions, the real store on a real folder, virtual time.

A point is a role, a class of effects, a stage, and the count of its occurrence:

    before   the machine has decided, nothing is done yet
    after    the shell has executed the effect, or submitted it to its worker
    job      the worker has done a job of that effect, and has not reported it

Jobs that a transport event submits (a chunk, the end of a stream) have the name "transport". At the
point the process ends: what it planned does not happen, its disk accepts nothing more, and keeps
what the power model says. A few seconds later it is launched again.

What happened is compared with what the folder holds: acknowledged deltas, the frames that clients
sent, and the weights of every version, recomputed here from those frames and the ledger by the
formulas of the design.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from typing import Any

from crash_checks import check
from crash_clients import (
    DOWN,
    MANIFEST,
    MAX_STALENESS,
    OTHER,
    OUTER,
    Observed,
    VectorLearner,
)
from crash_disk import CrashDisk
from crash_journal import CrashJournal, ProcessRecords
from crash_point import Points, Scheduler, WatchedWorker

import fsl_transport as tp
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.shell import ParameterServerShell, RunFacts, Surroundings
from fsl_async.observe.ledger_audit import JOURNAL
from fsl_async.roles.machine import EndSession, Finish, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client import ClientMachine, ClientRules
from fsl_async.roles.sync.progress import Decay, RunLimits
from fsl_async.roles.sync.ps import ParameterServerMachine, ParameterServerRules
from fsl_async.roles.sync.ps_state import PaceRules
from fsl_async.roles.sync.round import RoundRules
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.store.aggregation import Latest
from fsl_async.store.errors import LearnError
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import StoreSettings
from fsl_async.store.store import Store
from fsl_async.tools.sim.world import ProcessClock

SERVER = "ps"
ROUNDS, EVERY_S, SHARDS = 4, 12.0, 4
LONGEST_S = 1200.0
RARE_AT_S = 18.0
NOON = 1_800_000_000.0
"""Wall clock at the start of the world, seconds since 1970."""


class World:
    """One run to its end. `violations` has one sentence for each violation."""

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
        threads=1,
        latest=False,
    ):
        """Prepare a run.

        power: what a crash of the parameter server leaves, as in `CrashDisk.bury`.
        disk: makes the first disk of the parameter server.
        wall: seconds added to the wall clock, from the virtual time and the number of the launch.
        latest: whether versions use the newest delta of each other client again.
        threads: of its store; with several, the order of the disk's calls differs from run to run.
        """
        self.root, self.run_dir = root, root / "run"
        self.points = Points(point)
        self.power = power
        self.wall = wall
        self.trigger, self.rounds, self.extras = trigger, rounds, extras
        self.threads = threads
        self.outer = OuterSettings("average") if latest else OUTER
        self.latest = latest
        self.aggregation = {"rule": Latest(), "reuse": MAX_STALENESS} if latest else {}
        self.scheduler = Scheduler()
        self.network = tp.MemNetwork(self.scheduler, 7, conditions or tp.Conditions(delay_s=0.02))
        self.observed = Observed()
        self.processes = ProcessRecords()
        self.server = SERVER
        self.others = root.parent / f"{root.name}-clients"  # other machines, which keep their power
        self.alive: dict[str, tuple[ProcessClock, Any, Any]] = {}
        self.launches: Counter[str] = Counter()
        self.finishes: dict[str, list[Finish]] = {}
        self.violations: list[str] = []
        self.store = None
        self._first_disk = disk
        self.disk = None
        self.over = False
        self.dead_end = ""
        self.doubted = False

    # --- processes ---

    def now(self, launch):
        """Return the wall clock of a process."""
        return NOON + self.scheduler.time() + self.wall(self.scheduler.time(), launch)

    def _worker(self, clock, role, name):
        rng = random.Random(f"{name}/{self.launches[name]}")
        kill = lambda: self.kill(name)  # noqa: E731
        return WatchedWorker(clock, lambda: rng.uniform(0.001, 0.02), self.points, role, kill)

    def kill(self, name):
        """Kill a process as kill -9 does; 3 s later it is launched again."""
        clock, _, _ = self.alive.pop(name)
        clock.alive = False
        self.network.kill(name)
        if name == SERVER:
            self.disk.dead = True
        cut = name == SERVER and self.power is not None
        self.processes.dies(name, self.scheduler.time(), cut=cut)
        launch = self.launch_server if name == SERVER else lambda: self.launch_client(name)
        self.scheduler.call_at(self.scheduler.time() + 3.0, launch)

    def launch_server(self):
        """Start the parameter server on what the folder holds."""
        if self.store is not None:
            self._end_threads()
            self.disk.bury(self.power)
        make = self._first_disk or CrashDisk
        self._first_disk = None
        self.launches[SERVER] += 1
        launch = self.launches[SERVER]
        self.disk = make(self.root)
        settings = StoreSettings(
            keep_versions=2,
            codec_down=DOWN,
            outer=self.outer,
            **self.aggregation,
            threads=self.threads,
            # Rounds go from disk to disk. Checkpoints have no thread, so that calls can be counted.
            resident=self.trigger != "rounds",
            snapshot_thread=False,
            state_growth=0.0,
        )
        self.store = store = Store(
            self.run_dir,
            settings,
            files=self.disk,
            wall_clock=lambda: self.now(launch),
            clock=self.scheduler.time,
        )
        clock = ProcessClock(self.scheduler)
        rules = ParameterServerRules(
            trigger=self.trigger,
            every_s=EVERY_S,
            limits=RunLimits(self.rounds),
            round=RoundRules(0.5, 4.0, 1.0, 3.0),
            keep_versions=2,
            drain_s=5.0,
            shards=SHARDS,
            max_staleness=MAX_STALENESS,
            reuses=self.latest,
            buffer=1 if self.latest else 2,
            least_s=2.0,
            pace=PaceRules(12 if self.latest else 4, 9.0) if self.trigger == "buffer" else None,
        )
        weighting = weighting_named("latest" if self.latest else "tokens")
        machine = ParameterServerMachine(rules, weighting, "crash")
        self.alive[SERVER] = (clock, None, None)
        try:
            recovered = self._retry(store.recover)
            self._retry(lambda: store.start_run("crash"))
            journal = self._journal(SERVER, self.run_dir, clock, lambda: self.now(launch))
        except SystemExit:
            self.kill(SERVER)
            return
        except LearnError as error:
            self.dead_end = f"the parameter server cannot be started again: {error}"
            return

        def listener(handle):
            return tp.ListenerEndpoint(
                self.network.listener(SERVER),
                clock,
                tp.TransportSettings(heartbeat_every_s=1.0, expire_after_s=4.0),
                handle,
                SERVER,
                incarnation=int(self.now(launch) * 1e9),
                rng=random.Random(f"{SERVER}/{launch}"),
            )

        shell = ParameterServerShell(
            machine,
            RunFacts("crash", SHARDS, {}),
            Surroundings(
                store=store,
                worker=self._server_worker(clock),
                scheduler=clock,
                journal=journal,
                listener=listener,
                say=lambda _: None,
                finished=lambda finish: self._finished(SERVER, finish),
            ),
        )
        self._observe(shell, machine)
        self.points.watch(shell.node, "ps", lambda: self.kill(SERVER))
        self.alive[SERVER] = (clock, shell.endpoint, shell)
        shell.start(recovered)

    def _journal(self, name, folder, clock, wall):
        """Open the process's journal."""
        disk = self.disk if name == SERVER else None
        made = CrashJournal(
            folder / JOURNAL, clock, wall, disk=disk, killed=lambda: self.kill(name)
        )
        return self.processes.begin(name, made)

    def _end_threads(self):
        """End the store's threads of a dead process; its disk has accepted nothing since it
        died.
        """
        self.store._pool.close()

    def _retry(self, act):
        """Try again, as a launcher does: a full disk does not stay full."""
        for _ in range(12):
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - the last one counts
                last = error
        raise last

    def _server_worker(self, clock):
        worker = self._worker(clock, "ps", SERVER)
        run = worker._run

        def watched(job):
            try:
                return job()
            finally:
                # If the kill hit another thread of the store, no error reached this one.
                if SERVER in self.alive and self.disk.dead:
                    raise SystemExit("killed")

        def guarded(job, done, failed):
            try:
                run(lambda: watched(job), done, failed)
            except SystemExit:  # the disk killed it in the middle of a call
                if SERVER in self.alive:
                    self.kill(SERVER)
                raise

        worker._run = guarded
        return worker

    def _observe(self, shell, machine):
        """Record the acknowledgements that the parameter server sends, and add rare effects."""
        handle = machine.handle

        def noted(event, now):
            effects = handle(event, now)
            for effect in effects:
                if isinstance(effect, Send) and effect.message.tag == "accepted/1":
                    self.observed.acknowledged[effect.message.key.text] = None
                    self.processes.acknowledges(SERVER, effect.message.key.text, now)
            return (
                effects
                + self._quarantine_and_release(effects, now)
                + self._rare_effects(machine, now)
            )

        machine.handle = noted

    def _quarantine_and_release(self, effects, now):
        """Quarantine a delta as odd and release it at once, as the norm guard may; once."""
        counted = next((one for one in effects if isinstance(one, do.Accumulate)), None)
        if not self.extras or counted is None or self.doubted:
            return []
        self.doubted = True
        return [do.Quarantine(counted.key, "odd", held=True), do.Release(counted.key), counted]

    def _rare_effects(self, machine, now):
        """Return effects that seldom occur, once: an unrequested stream, the end of a session, a
        check of its own files.
        """
        if not self.extras or now < RARE_AT_S or machine.version < 0 or "a" not in machine.members:
            return []
        self.extras = False
        return [
            do.SendVersion("a", "full", machine.version),
            EndSession("bb", "not a member"),
            do.CheckTransfers(),
            do.VerifyVersion(machine.version),
            do.KeepDecay(Decay(0.9, machine.progress.limits, machine.progress.limits)),
        ]

    def launch_client(self, name):
        """Start a new incarnation of a client."""
        self.launches[name] += 1
        launch = self.launches[name]
        clock = ProcessClock(self.scheduler)
        incarnation = int(self.now(launch) * 1e9)
        machine = ClientMachine(ClientRules(), name, incarnation)
        if name == "stray":
            machine.run = "elsewhere"
        rng = random.Random(f"{name}/{launch}")
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
                self.observed.acknowledged[event.key.text] = None
                self.processes.acknowledges(name, event.key.text, now)
            if isinstance(event, ev.Welcomed):
                self.observed.shards.setdefault(name, set()).add(event.shard)
                learner.incarnation = event.incarnation
            looks = [do.CheckTransfers()] if isinstance(event, ev.Preempting) else []
            return handle(event, now) + looks

        machine.handle = noted
        shell = ClientShell(
            machine,
            learner,
            lambda take: tp.DialerEndpoint(
                self.network.dialer(name, SERVER),
                clock,
                tp.TransportSettings(heartbeat_every_s=1.0, expire_after_s=4.0),
                take,
                name,
                incarnation=incarnation,
                rng=rng,
            ),
            worker=self._worker(clock, "client", name),
            scheduler=clock,
            journal=self._journal(name, self.others / name, clock, lambda: self.now(launch)),
            say=lambda _: None,
            finished=lambda finish: self._finished(name, finish),
            welcomed=lambda _: None,
            end_training=lambda _: learner.stop(),
        )
        self.points.watch(shell.node, "client", lambda: self.kill(name))
        self.alive[name] = (clock, shell.endpoint, shell)
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
        """End a process that exits by itself."""
        if name not in self.alive:
            return
        self.processes.records[name][-1].journal.close()
        if again:
            self.kill(name)
            return
        clock, _, _ = self.alive.pop(name)
        clock.alive = False
        self.network.kill(name)

    def preempt(self, name):
        """Send a client notice that it will be preempted."""
        if name in self.alive:
            clock, _, shell = self.alive[name]
            shell.node.feed(ev.Preempting(clock.time() + 15.0, "the test"))

    # --- the run ---

    def run(self):
        """Run to the end and check everything."""
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
        self.processes.end()
        self.violations = [self.dead_end] if self.dead_end else check(self)
        return self

    def close(self):
        """Remove the folders."""
        if self.disk is not None:
            self.disk.dead = False
            self.disk.bury()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.rmtree(self.others, ignore_errors=True)

"""Simulates a run: production code in virtual time around the user's training function.

One seed decides everything but what the training function computes: the order of all calls, faults,
and each client's default random generators. With `step_seconds` the same seed gives the same
versions, to the bit, whatever the number of cores and processes; without it the times of steps are
measured, and differ from one computer to the next.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from attrs import evolve

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.accounting.traffic import CountedLink, Traffic, TrafficNotes
from fsl_async.config.fixed import keep_settings
from fsl_async.config.settings import Config
from fsl_async.errors import FslError, RefusedError, UsageError
from fsl_async.learn.user_code import Task, own_failure
from fsl_async.nodes.ps.node import JOURNAL, start_facts, store_settings_of
from fsl_async.nodes.ps.own_rules import keep_texts
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.wire import Welcome, count_weights
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.table import Reporter
from fsl_async.process.memory import peak_bytes
from fsl_async.roles.machine import Done, DrainAsked, Effect, Event, Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.delta import MergedDelta
from fsl_async.roles.sync.events import Recovered
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.store.vectors.memory import available_bytes
from fsl_async.tools.sim.residents import Residents
from fsl_async.tools.sim.result import ClientPart, Point, Result, by_category, loss_of
from fsl_async.tools.sim.settings import HOUR_S, SimulationSettings, TaskSettings, bytes_of
from fsl_async.tools.sim.task_training import TaskRun, TaskTraining
from fsl_async.tools.sim.training import Launch, Trainer, VirtualWorker
from fsl_async.tools.sim.workers import WindowedSimulation
from fsl_async.tools.sim.world import ProcessClock, SilentJournal

WALL_S = 1_577_836_800.0
"""Seconds since 1970 at which virtual time begins, 2020-01-01 UTC: the same in every simulation, so
that the same seed gives the same files."""
JOB_S = 0.001
"""Virtual seconds of a job of the codec, or of the store."""
GOODBYE_S = 120.0
"""Virtual seconds in which clients may receive the end of the run."""
NO_VERSION_S = 48 * HOUR_S
"""Virtual seconds without a new version after which the simulation ends with an error."""
CLIENTS = "clients"
"""Folder of the clients' own files, in the run directory."""


class ServerJournal:
    """Journal and traffic of one process of a server. wall: seconds since 1970."""

    def __init__(self, folder: Path, clock: ProcessClock, wall: Callable[[], float]) -> None:
        self._clock, self.traffic = clock, Traffic()
        self.writer = JournalWriter(folder / JOURNAL, wall)
        self.reporter = Reporter(self.writer, lambda _: None, clock.time, wall)
        self._notes = TrafficNotes(clock, self.reporter, self.traffic)

    def started(self, role: str, name: str, **facts: Any) -> None:
        """Record the start of the process; name: in the simulated network."""
        self.reporter.note(
            "node_started",
            self._clock.time(),
            role=role,
            address=f"mem://{name}",
            pid=os.getpid(),
            host="simulated",
            encrypted=False,
            **facts,
        )

    def close(self, *, in_order: bool) -> None:
        """Close the journal; in_order: with the last traffic, and the end of the process."""
        if in_order:
            self._notes.close()
            self.reporter.note("node_ended", self._clock.time())
        self.writer.close()


class TaskSimulation(WindowedSimulation):
    """A simulated run of a training function. given: config without what it implies."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        task: Task,
        given: Config,
        config: Config,
        settings: TaskSettings,
        run_dir: Path,
        log: Callable[[str], None],
        progress: Callable[[Point], None],
    ) -> None:
        around = SimulationSettings(settings.clients, seed=given.run.seed, faults=settings.faults)
        self.given, self.root = settings, run_dir
        delay_s = min(self._conditions_of(number)[0].delay_s for number in range(settings.clients))
        super().__init__(around, config, settings.workers, delay_s)
        self._transport = config.transport(max(1024, 2 * settings.clients))
        self._dials_with = tp.TransportSettings()  # until the welcome brings the run's
        self.run_name = f"{config.run.name}-{self._rng('run').getrandbits(32):08x}"
        self.parts = {
            name: ClientPart(name, settings.rate_of(number))
            for number, name in enumerate(self.names)
        }
        self.over: set[str] = set()
        """Clients that have ended by themselves."""
        self._log, self._progress = log, progress
        self._logged: set[str] = set()
        self._journal: ServerJournal
        """The journal of the newest process of the parameter server."""
        self.traffics: list[Traffic] = []
        """The traffic of all processes of the servers."""
        self._store_open: Store
        self._reason = self._commit_failed = ""
        """Why the run has ended; empty while it goes on."""
        self._over_s: float | None = None
        """When clients have had time to receive the end of the run."""
        self._points: list[Point] = []
        self._merged: tuple[MergedDelta, ...] = ()
        self._is_sized = False
        folder = run_dir / CLIENTS
        self.task_run = TaskRun(
            task=task,
            config=given,
            clients=settings.clients,
            step_seconds=settings.step_seconds,
            folder=folder,
            residents=Residents(folder, settings.resident),
            attached=self.check_memory,
            say=lambda name, line: self.note("say", name, line),
            ended=self.ended_itself,
        )
        self._set_links(self.network, self.server)

    launch_s = 1.0

    def _conditions_of(self, number: int) -> tuple[tp.Conditions, tp.Conditions]:
        """The conditions of a client's link, up and down."""
        return self.given.link_of(number).conditions(self.given.profile)

    def _set_links(self, network: tp.MemNetwork, server: str) -> None:
        """Give the clients' links to a server their conditions."""
        for number, name in enumerate(self.names):
            up, down = self._conditions_of(number)
            network.set_direction(name, server, up)
            network.set_direction(server, name, down)

    # --- running ---

    def result(self) -> Result:
        """Run to the end of the run, or of the simulated time."""
        started, run = time.perf_counter(), self.task_run
        try:
            self.play()
            self.leave()
            self._close_server()
        finally:
            self.end_workers()
            self.leave()
            run.states.leave()
            run.residents.close()
            self.write_out()
            shutil.rmtree(run.folder, ignore_errors=True)
        return Result(
            self.root,
            self.run_name,
            self._reason,
            tuple(self._points),
            tuple(self.parts.values()),
            dict(self.counts.kinds),
            time.perf_counter() - started,
            peak_bytes() + self.worker_memory,
            by_category(self.traffics),
            "samples" if self.config.split.is_on else "tokens",
        )

    def write_out(self) -> None:
        """Write the simulated disk into the run directory."""
        self.disk.write_to(self.root, self.run_dir)

    def begin(self) -> None:
        """See `Simulation.begin`."""
        super().begin()
        if self._is_here(self.server):
            if self.given.hours is not None:
                self._at(self.given.hours * HOUR_S, self.end_run, "the simulated time is over")
            self._at(NO_VERSION_S, self._check_versions, -1)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and all clients, or they have had time to receive its end."""
        if self.violations:
            raise FslError(f"the simulated parameter server fails: {self.violations[0]}")
        if not self._reason:
            return False
        self._over_s = self._over_s or self.scheduler.time() + GOODBYE_S
        return self.all_over or self.scheduler.time() > self._over_s

    @property
    def all_over(self) -> bool:
        """Whether all processes but the parameter server have ended."""
        return len(self.over) == len(self.names)

    def end_run(self, reason: str) -> None:
        """End the run as Ctrl-C does, as soon as the parameter server runs."""
        self._wants_calm = True
        server = self.processes.get(self.server)
        if server is None:
            self._at(1.0, self.end_run, reason)
            return
        machine = cast("ParameterServerMachine", server.shell.machine)
        if not machine.end.asked:
            server.shell.node.feed(DrainAsked(reason))

    def take(self, kind: str, name: str, value: Any) -> None:
        """See `WindowedSimulation.take`."""
        if kind == "say":
            line = re.sub(r"\d+", "", value)
            if line not in self._logged:  # once for all clients, whatever numbers are in it
                self._logged.add(line)
                self._log(f"{name}: {value}" if name else value)
        elif kind == "failed":
            if not self._reason:
                raise value
        elif name not in self.over:
            self.over.add(name)
            if len(self.over) == len(self.names) and not self._reason:
                self.end_run("all clients have ended")

    def _close_server(self) -> None:
        """End the parameter server in order: write what is still to be written."""
        self._store_open.finish_snapshot()
        self._journal.close(in_order=True)

    def _check_versions(self, before: int) -> None:
        newest = self._points[-1].version if self._points else -1
        if newest == before and not self._reason:
            hours = f"{NO_VERSION_S / HOUR_S:.0f} virtual hours"
            why = self._commit_failed or (
                "do enough clients train (sync.quorum, sync.min_clients), and do deltas arrive"
                " (--link)?"
            )
            raise FslError(f"no version was made within {hours} after version {newest}: {why}")
        self._at(NO_VERSION_S, self._check_versions, newest)

    # --- the parameter server ---

    def _link_of(self, name: str) -> tp.Link:
        return CountedLink(super()._link_of(name), self._journal.traffic, at_client=False)

    def _journal_of(self, name: str, clock: ProcessClock) -> Journal:
        if name != self.server:
            return SilentJournal()
        self._journal = ServerJournal(self.root, clock, self._wall)
        self.traffics.append(self._journal.traffic)
        return self._journal.reporter

    def _wall(self) -> float:
        return WALL_S + self.scheduler.time()

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        return VirtualWorker(clock, lambda: JOB_S)

    def _store(self, clock: ProcessClock) -> Store:
        return Store(
            self.run_dir,
            evolve(store_settings_of(self.config), threads=1),
            files=self._files,
            wall_clock=self._wall,
            clock=self.scheduler.time,
            later=lambda write: write(),
        )

    def _recovered(self, store: Store, recovered: Recovered) -> None:
        self._store_open = store
        keep_settings(self.root, self.config, recovered.version)
        keep_texts(self.root, self.config)
        self._journal.started("ps", self.server, run=self.run_name, **start_facts(self.config))

    def _server_says(self, note: Note) -> None:
        self._journal.reporter.say(note)

    def _count(self, manifest: Manifest, direction: Direction, index: int, frame: bytes) -> None:
        traffic = self._journal.traffic
        count_weights(traffic, manifest, direction, index, frame, config=self.config)

    def _server_finished(self, finish: Finish) -> None:
        super()._server_finished(finish)
        if not finish.exit_code:
            self._wants_calm = self._ending = True
            self._reason = self._reason or finish.reason

    def _after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Effect]
    ) -> None:
        """Record a version once it is durable, and what it has merged."""
        newest = self._points[-1].version if self._points else -1
        if machine.version > newest:
            self._add_point(machine)
        if isinstance(event, Done) and event.topic is do.Commit:
            self._commit_failed = event.problem
        for effect in effects:
            if isinstance(effect, do.Commit):
                self._merged = effect.merged

    def _add_point(self, machine: ParameterServerMachine) -> None:
        merged, self._merged = self._merged, ()
        for one in merged:
            part = self.parts[one.key.client]
            part.deltas += 1
            part.tokens += one.delta.tokens
            part.staleness += one.staleness
        point = Point(
            machine.version,
            machine.digest,
            self.scheduler.time() / HOUR_S,
            machine.tokens_total,
            sum(one.sockets["up"] for one in self.traffics),
            sum(one.sockets["down"] for one in self.traffics),
            loss_of(merged, "loss"),
            loss_of(merged, "eval_loss"),
            len(merged),
        )
        self._points.append(point)
        self._progress(point)

    # --- clients ---

    def _launch_client(self, name: str) -> None:
        self.parts[name].launches += 1
        super()._launch_client(name)

    def _next_incarnation(self, name: str) -> int:
        if name in self.parts:
            return self.parts[name].launches
        return super()._next_incarnation(name)

    def _training(self, launch: Launch) -> Trainer:
        number = self.names.index(launch.name)
        rate = self.given.rate_of(number)
        return TaskTraining(self.task_run, launch, number=number, rate=rate)

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        training = self.processes[name].training
        assert isinstance(training, TaskTraining)
        training.welcomed(welcome)
        endpoint = self.processes[name].shell.endpoint
        assert isinstance(endpoint, tp.DialerEndpoint)
        endpoint.adopt(self._transport)

    def _after_client(self, *_: Any) -> None:
        """See `Simulation`: nothing is known of a user's training, so nothing is checked."""

    def _client_says(self, name: str, note: Note) -> None:
        if note.level != "info":
            self.note("say", name, note.text)

    def _client_finished(self, name: str, finish: Finish) -> None:
        failed = RefusedError(finish.reason) if finish.exit_code else None
        self._at(0.0, self.ended_itself, name, failed)

    def ended_itself(self, name: str, error: BaseException | None) -> None:
        """Take the end of a client by itself, and the error that ended it."""
        if error is not None:
            self.note("failed", name, _named(name, error))
        elif name in self.processes:
            self._kill(name)
            self.note("ended", name, None)

    def check_memory(self, values: int) -> None:
        """Decide how many models are in memory at once. Raises UsageError if none fits."""
        if self._is_sized:
            return
        self._is_sized = True
        clients, workers = self.given.clients, self.given.workers
        exchanged, trained = bytes_of(values)
        have, limit = available_bytes(), self.given.resident
        room = clients if have is None else int((have - clients * exchanged) / trained)
        if room < 1:
            raise UsageError(
                f"{clients} clients with {values:,} values each exchange"
                f" {clients * exchanged / 1e9:.2f} GB, {(have or 0) / 1e9:.1f} GB are available:"
                " simulate fewer clients (--clients), or a smaller model"
            )
        limit = min(limit or clients, clients, room)
        need = clients * exchanged + limit * trained
        line = f"{clients} clients with {values:,} values each need about {need / 1e9:.2f} GB"
        if limit < clients:
            self.task_run.residents.limit = max(1, limit // workers)
            line += f", with the models of {limit} in memory and the others in files (--resident)"
        self.note("say", "", line)

    def _kill(self, name: str) -> bool:
        process = self.processes.get(name)
        if process is None:
            return False
        if isinstance(process.training, TaskTraining):
            part = self.parts[name]
            part.waited_s += process.training.thread.waited_s
            part.steps += process.training.steps
        else:
            self._journal.close(in_order=False)
        return super()._kill(name)


def _named(name: str, error: BaseException) -> BaseException:
    """Return the error to raise for one that ended a client."""
    known = own_failure(error) if isinstance(error, Exception) else None
    if isinstance(error, FslError) or known is None:
        found = error
    else:
        known.__cause__ = error
        found = known
    if isinstance(found, FslError):
        found.message = f"{name}: {found.message}"
        found.args = (found.message,)
    return found

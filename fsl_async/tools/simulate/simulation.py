"""Simulates a run: production code in virtual time around the user's training function.

It is the `Simulation` of `fsl_async.tools.sim` with other training, links and journals, in one
process or in several (`places`). One seed decides everything but what the training function
computes: the order of all calls, faults, and each client's default random generators. With
`step_seconds` the same seed gives the same versions, to the bit, whatever the number of cores and
processes; without it the times of steps are measured, and differ from one computer to the next.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from attrs import evolve, frozen
from torch import nn

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.accounting.traffic import CountedLink, Traffic, TrafficNotes
from fsl_async.config.fixed import keep_settings
from fsl_async.config.recipes import with_implied
from fsl_async.config.settings import Config
from fsl_async.errors import FslError, RefusedError, RunDirError, UsageError
from fsl_async.learn.data.facts import described
from fsl_async.learn.user_code import Task, own_failure
from fsl_async.nodes.ps.aggregation import check_aggregation
from fsl_async.nodes.ps.directory import check_directory
from fsl_async.nodes.ps.node import JOURNAL, start_facts, store_settings_of
from fsl_async.nodes.ps.own_rules import keep_texts, with_base_rule
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.wire import Welcome, exchanged_category
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.ledger_audit import LEDGER
from fsl_async.observe.table import Reporter
from fsl_async.process.memory import peak_bytes, share_one_heap
from fsl_async.roles.machine import Done, DrainAsked, Effect, Event, Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.delta import MergedDelta
from fsl_async.roles.sync.events import Recovered
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.store.vectors.memory import available_bytes
from fsl_async.tools.sim.simulation import Simulation, SimulationSettings
from fsl_async.tools.sim.training import Trainer, VirtualWorker
from fsl_async.tools.sim.world import HOUR_S, Launch, ProcessClock, SilentJournal, World
from fsl_async.tools.simulate.baton import RandomStates
from fsl_async.tools.simulate.client import OwnTraining
from fsl_async.tools.simulate.places import PlacedNetwork, Places, Residents
from fsl_async.tools.simulate.result import ClientPart, Point, Result, by_category, loss_of
from fsl_async.tools.simulate.settings import SimulateSettings, bytes_of, check_simulated

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


def simulate(
    task: Task,
    config: Config,
    settings: SimulateSettings,
    run_dir: Path,
    *,
    log: Callable[[str], None] = lambda _: None,
    progress: Callable[[Point], None] = lambda _: None,
) -> Result:
    """Simulate a run to its end; see `fsl_async.simulate`.

    config: without what the kind of run implies. progress: takes each version.
    Raises UsageError, ConfigError, RunDirError, TaskError, and what ended a client.
    """
    check_simulated(config, settings)
    check_directory(run_dir)
    if (run_dir / LEDGER).exists():
        raise RunDirError(
            f"{run_dir} holds a run, and a simulation begins a new one: give another --run-dir"
        )
    config = with_base_rule(config)
    implied = described(with_implied(config))
    check_aggregation(implied)
    if settings.step_seconds is None:
        log(
            "steps cost the time that they take here, so another computer makes other versions:"
            " give step_seconds (--step-seconds) to make them repeatable"
        )
    share_one_heap()
    before = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or 1)
    try:
        kind: type[OwnSimulation] = OwnSimulation
        if implied.split.has_server:
            from fsl_async.tools.simulate.split_simulation import OwnSplitSimulation

            kind = OwnSplitSimulation
        return kind(task, config, implied, settings, run_dir, log, progress).result()
    finally:
        torch.set_num_threads(before)


@frozen
class ServerBooks:
    """The books of one process of a server."""

    clock: ProcessClock
    writer: JournalWriter
    reporter: Reporter
    traffic: Traffic
    notes: TrafficNotes

    @classmethod
    def opened(cls, folder: Path, clock: ProcessClock, wall: Callable[[], float]) -> ServerBooks:
        """Open the journal in a server's folder. wall: seconds since 1970."""
        writer, traffic = JournalWriter(folder / JOURNAL, wall), Traffic()
        reporter = Reporter(writer, lambda _: None, clock.time, wall)
        return cls(clock, writer, reporter, traffic, TrafficNotes(clock, reporter, traffic))

    def started(self, role: str, name: str, **facts: Any) -> None:
        """Record the start of the process; name: in the simulated network."""
        address = f"mem://{name}"
        self.reporter.note(
            "node_started",
            self.clock.time(),
            role=role,
            address=address,
            pid=os.getpid(),
            host="simulated",
            encrypted=False,
            **facts,
        )

    def close(self, *, in_order: bool) -> None:
        """Close the journal; in_order: with the last traffic, and the end of the process."""
        if in_order:
            self.notes.close()
            self.reporter.note("node_ended", self.clock.time())
        self.writer.close()


class OwnSimulation(Simulation):
    """A simulated run of a training function. given: config without what it implies."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        task: Task,
        given: Config,
        config: Config,
        settings: SimulateSettings,
        run_dir: Path,
        log: Callable[[str], None],
        progress: Callable[[Point], None],
    ) -> None:
        seed = given.run.seed
        around = SimulationSettings(settings.clients, seed=seed, faults=settings.faults)
        profile = settings.profile
        world = World(profile, seed)
        self.places = Places(self, settings.workers)
        world.network = PlacedNetwork(world.scheduler, seed, self.places.is_here)
        super().__init__(around, world=world, config=config)
        self.own, self.root = settings, run_dir
        self._transport = config.transport(max(1024, 2 * settings.clients))
        self._dials_with = tp.TransportSettings()  # until the welcome brings the run's
        run_id = random.Random(f"{seed}/run").getrandbits(32)  # noqa: S311 - not for secrets
        self.run_name = f"{config.run.name}-{run_id:08x}"
        self.parts = {
            name: ClientPart(name, settings.rate_of(number))
            for number, name in enumerate(self.names)
        }
        self.over: set[str] = set()
        """Clients that have ended by themselves."""
        self._log, self._progress = log, progress
        self._logged: set[str] = set()
        self._chances: dict[str, random.Random] = {}
        self._books: ServerBooks | None = None
        self.traffics: list[Traffic] = []
        """The traffic of all processes of the servers."""
        self._store_open: Store | None = None
        self._wants_calm = False
        self._reason = self._commit_failed = ""
        """Why the run has ended; empty while it goes on."""
        self._over_s: float | None = None
        """When clients have had time to receive the end of the run."""
        self._points: list[Point] = []
        self._merged: tuple[MergedDelta, ...] = ()
        self._is_sized = False
        self.states = RandomStates()
        self.task, self.given, self.folder = task, given, run_dir / CLIENTS
        self.residents = Residents(self.folder, settings.resident)
        self.owners: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
        """Module -> the training that it belongs to."""
        self._set_links(self.network, self.server)

    def _set_links(self, network: tp.MemNetwork, server: str) -> None:
        """Give the clients' links to a server their conditions."""
        for number, name in enumerate(self.names):
            up, down = self.own.link_of(number).conditions(self.profile)
            network.set_direction(name, server, up)
            network.set_direction(server, name, down)

    # --- running ---

    def result(self) -> Result:
        """Run to the end of the run, or of the simulated time."""
        started = time.perf_counter()
        try:
            self.places.run()
            self.leave()
            self._close_server()
        finally:
            self.places.close()
            self.leave()
            self.states.leave()
            self.residents.close()
            self.write_out()
            shutil.rmtree(self.folder, ignore_errors=True)
        return Result(
            self.root,
            self.run_name,
            self._reason,
            tuple(self._points),
            tuple(self.parts.values()),
            dict(self.counts.kinds),
            time.perf_counter() - started,
            peak_bytes() + self.places.memory,
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
            if self.own.hours is not None:
                self._at(self.own.hours * HOUR_S, self.end_run, "the simulated time is over")
            self._at(NO_VERSION_S, self._check_versions, -1)

    def _is_here(self, name: str) -> bool:
        return self.places.is_here(name)

    def _plan_launch(self, name: str) -> None:
        self._at(self._chance_of(name, "launch").uniform(0.0, 1.0), self._launch_client, name)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and all clients, or they have had time to receive it."""
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

    @property
    def shortest_delay_s(self) -> float:
        """The shortest delay of a link."""
        links = self.own.links[: len(self.names)]
        return min(link.conditions(self.profile)[0].delay_s for link in links)

    def settle(self, *, calm: bool = False) -> bool:
        """Return whether there are no new faults from now on: the run is to end.

        Called between windows, so that faults end in all places at the same time.
        """
        self._calm = self._calm or self._wants_calm or calm
        return self._calm

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
        """Take a note of a client's place. Raises what ended the client."""
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

    def leave(self) -> None:
        """End the client processes that are here."""
        for name in [name for name in self.processes if name != self.server]:
            self._kill(name)

    def part_here(self) -> dict[str, Any]:
        """Return what the clients of this place have done, and their faults."""
        parts = [part for part in self.parts.values() if part.launches]
        return {
            "parts": [[one.name, one.steps, one.waited_s, one.launches] for one in parts],
            "faults": self.counts.kinds,
        }

    def add(self, found: Mapping[str, Any]) -> None:
        """Add what another place has done."""
        for name, steps, waited_s, launches in found["parts"]:
            part = self.parts[name]
            part.steps, part.waited_s, part.launches = steps, waited_s, launches
        for kind, count in found["faults"].items():
            self.counts.kinds[kind] = self.counts.kinds.get(kind, 0) + count

    def _close_server(self) -> None:
        """End the parameter server in order: write what is still to be written."""
        books, store = self._books, self._store_open
        assert books is not None, "a run ends at its parameter server"
        assert store is not None
        store.finish_snapshot()
        books.close(in_order=True)

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
        books = self._books
        assert books is not None, "a process has books"
        return CountedLink(super()._link_of(name), books.traffic, at_client=False)

    def _journal_of(self, name: str, clock: ProcessClock) -> Journal:
        if name != self.server:
            return SilentJournal()
        books = self._books = ServerBooks.opened(self.root, clock, self._wall)
        self.traffics.append(books.traffic)
        return books.reporter

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
        self._store_open, books = store, self._books
        assert books is not None, "a process has books"
        keep_settings(self.root, self.config, recovered.version)
        keep_texts(self.root, self.config)
        books.started("ps", self.server, run=self.run_name, **start_facts(self.config))

    def _server_says(self, note: Note) -> None:
        if self._books is not None:
            self._books.reporter.say(note)

    def _count(self, manifest: Manifest, direction: Direction, index: int, frame: bytes) -> None:
        assert self._books is not None, "a process has books"
        category = exchanged_category(self.config)
        self._books.traffic.weights(manifest, direction, index, frame, category=category)

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
        return OwnTraining(self, launch, number=number, rate=self.own.rate_of(number))

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        training = self.processes[name].training
        assert isinstance(training, OwnTraining)
        training.welcomed(welcome)
        endpoint = self.processes[name].shell.endpoint
        assert isinstance(endpoint, tp.DialerEndpoint)
        endpoint.adopt(self._transport)

    def _launched(self, name: str, incarnation: int, training: Trainer) -> None:
        """See `Simulation`: nothing is known of a user's training, so nothing is checked."""

    def _after_client(self, *_: Any) -> None:
        """See `_launched`."""

    def _client_says(self, name: str, note: Note) -> None:
        if note.level != "info":
            self.places.note("say", name, note.text)

    def _client_finished(self, name: str, effect: Finish) -> None:
        failed = RefusedError(effect.reason) if effect.exit_code else None
        self._at(0.0, self.ended_itself, name, failed)

    def ended_itself(self, name: str, error: BaseException | None) -> None:
        """Take the end of a client by itself, and the error that ended it."""
        if error is not None:
            self.places.note("failed", name, _named(name, error))
        elif name in self.processes:
            self._kill(name)
            self.places.note("ended", name, None)

    def check_memory(self, values: int) -> None:
        """Decide how many models are in memory at once. Raises UsageError if none fits."""
        if self._is_sized:
            return
        self._is_sized = True
        clients, places = self.own.clients, self.own.workers
        exchanged, trained = bytes_of(values)
        have, limit = available_bytes(), self.own.resident
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
            self.residents.limit = max(1, limit // places)
            line += f", with the models of {limit} in memory and the others in files (--resident)"
        self.places.note("say", "", line)

    # --- faults: each place decides them alike ---

    def _chance_of(self, name: str, fault: str) -> random.Random:
        key = f"{self.config.run.seed}/{name}/{fault}"
        if key not in self._chances:
            self._chances[key] = random.Random(key)  # noqa: S311 - not for secrets
        return self._chances[key]

    def _kill(self, name: str) -> bool:
        process = self.processes.get(name)
        if process is None:
            return False
        if isinstance(process.training, OwnTraining):
            part = self.parts[name]
            part.waited_s += process.training.thread.waited_s
            part.steps += process.training.steps
        elif self._books is not None:
            self._books.close(in_order=False)
        return super()._kill(name)

    def _kill_client(self, name: str) -> None:
        if self._is_here(name):
            super()._kill_client(name)

    def _is_up(self, name: str) -> bool:
        """See `Simulation`. Its process may be elsewhere."""
        return True


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

"""Simulates a run: production code in virtual time around the user's training function.

One seed decides everything but what the training function computes: the order of all calls, faults,
and each client's default random generators. With `step_seconds` the same seed gives the same
versions, to the bit, whatever the number of cores; without it the times of steps are measured, and
differ from one computer to the next.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fsl_transport as tp
from fsl_async.config.implied import with_implied
from fsl_async.config.settings import Config
from fsl_async.errors import FslError, RunDirError, UsageError
from fsl_async.learn.user_code import Task, own_failure
from fsl_async.nodes.ps.aggregation import check_aggregation
from fsl_async.nodes.ps.directory import check_directory
from fsl_async.observe.ledger_audit import LEDGER
from fsl_async.process.memory import peak_bytes
from fsl_async.roles.machine import Effect, Event, Finish
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.delta import MergedDelta
from fsl_async.store.available_memory import available_bytes
from fsl_async.tools.sim.faults import HOUR_S
from fsl_async.tools.sim.world import Counts, ProcessClock
from fsl_async.tools.simulate.baton import RandomStates
from fsl_async.tools.simulate.client import SERVER, ClientSite, SimulatedClient
from fsl_async.tools.simulate.result import ClientPart, Point, Result, loss_of
from fsl_async.tools.simulate.server import ServerSite, SimulatedServer
from fsl_async.tools.simulate.settings import SimulateSettings, check_simulated, least_bytes

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
    _check_new(run_dir)
    implied = with_implied(config)
    check_aggregation(implied)
    if settings.step_seconds is None:
        log(
            "steps cost the time that they take here, so another computer makes other versions:"
            " give step_seconds (--step-seconds) to make them repeatable"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or 1)
    try:
        return _Simulation(task, config, implied, settings, run_dir, log, progress).run()
    finally:
        torch.set_num_threads(before)


def _check_new(run_dir: Path) -> None:
    """Raise RunDirError for a directory that holds a run, or something else."""
    check_directory(run_dir)
    if (run_dir / LEDGER).exists():
        raise RunDirError(
            f"{run_dir} holds a run, and a simulation begins a new one: give another --run-dir"
        )


class _Simulation:
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
        seed = config.run.seed
        self._settings, self._config, self._run_dir = settings, config, run_dir
        self._profile = settings.profile
        self._log, self._progress = log, progress
        self._logged: set[str] = set()
        self._chance = random.Random(f"{seed}/faults")  # noqa: S311 - not for secrets
        self._scheduler = tp.VirtualScheduler()
        self._network = tp.MemNetwork(self._scheduler, seed)
        self._states = RandomStates()
        self._counts = Counts()
        self._clients: dict[str, SimulatedClient] = {}
        self._parts: dict[str, ClientPart] = {}
        self._server: SimulatedServer | None = None
        self._incarnations = 0
        self._calm = False
        """No new faults: the run is to end."""
        self._reason = ""
        """Why the run has ended; empty while it goes on."""
        self._error: BaseException | None = None
        self._ended: set[str] = set()
        self._points: list[Point] = []
        self._merged: tuple[MergedDelta, ...] = ()
        self._bytes = [0, 0]
        """Up and down, of earlier processes of the parameter server."""
        self._is_sized = False
        run = f"{config.run.name}-{random.Random(f'{seed}/run').getrandbits(32):08x}"  # noqa: S311
        self._server_site = ServerSite(
            config=config,
            run=run,
            run_dir=run_dir,
            seed=seed,
            network=self._network,
            watch=self._watch,
            finished=self._server_finished,
        )
        self._client_site = ClientSite(
            task=task,
            config=given,
            clients=settings.clients,
            step_seconds=settings.step_seconds,
            seed=seed,
            folder=run_dir / CLIENTS,
            network=self._network,
            states=self._states,
            log=self._say,
            attached=self._check_memory,
            finished=self._client_finished,
        )
        for number in range(settings.clients):
            name = f"c{number:04d}"
            self._parts[name] = ClientPart(name, settings.rate_of(number))
            up, down = settings.link_of(number).conditions(self._profile)
            self._network.set_direction(name, SERVER, up)
            self._network.set_direction(SERVER, name, down)

    # --- running ---

    def run(self) -> Result:
        """Run to the end of the run, or of the simulated time."""
        begun = time.perf_counter()
        profile = self._profile
        try:
            self._launch_server()
            for name in self._parts:
                self._at(self._chance.uniform(0.0, 1.0), self._launch_client, name)
                self._plan(profile.client_kill_every_s, self._kill_client, name)
                self._plan(profile.reset_every_s, self._reset, name)
                self._plan(profile.partition_every_s, self._cut, name)
            self._plan(profile.server_kill_every_s, self._kill_server)
            if self._settings.hours is not None:
                self._at(self._settings.hours * HOUR_S, self._end, "the simulated time is over")
            self._at(NO_VERSION_S, self._check_versions, -1)
            self._play()
            assert self._server is not None
            self._server.close()
        finally:
            self._unwind()
        return Result(
            self._run_dir,
            self._server_site.run,
            self._reason,
            tuple(self._points),
            tuple(self._parts.values()),
            dict(self._counts.kinds),
            time.perf_counter() - begun,
            peak_bytes(),
        )

    def _play(self) -> None:
        """Run until all have ended, or the clients have had time to receive the end of the run."""
        scheduler, over_s = self._scheduler, 0.0
        while self._error is None and scheduler.run_next():
            if not self._reason:
                continue
            over_s = over_s or scheduler.time() + GOODBYE_S
            if not self._clients or scheduler.time() > over_s:
                return
        if self._error is not None:
            raise self._error

    def _unwind(self) -> None:
        """End what still runs, and remove what clients keep for a relaunch."""
        for name in list(self._clients):
            self._remove(name)
        self._states.leave()
        if self._server is not None and not self._reason:
            self._server.kill()
        shutil.rmtree(self._run_dir / CLIENTS, ignore_errors=True)

    def _at(self, delay_s: float, action: Callable[..., object], *args: object) -> None:
        self._scheduler.call_at(self._scheduler.time() + delay_s, action, *args)

    def _plan(self, every_s: float, action: Callable[..., object], *args: object) -> None:
        if every_s and not self._calm:
            self._at(self._chance.expovariate(1.0 / every_s), action, *args)

    def _end(self, reason: str) -> None:
        """End the run, as soon as the parameter server runs; there are no new faults."""
        self._calm = True
        if self._server is not None:
            self._server.end_run(reason)
        else:
            self._at(1.0, self._end, reason)

    def _check_versions(self, before: int) -> None:
        newest = self._points[-1].version if self._points else -1
        if newest == before and not self._reason:
            hours = f"{NO_VERSION_S / HOUR_S:.0f} virtual hours"
            self._error = FslError(
                f"no version was made within {hours} after version {newest}: do enough clients"
                " train (sync.quorum, sync.min_clients), and do deltas arrive (--link)?"
            )
        self._at(NO_VERSION_S, self._check_versions, newest)

    # --- what happens ---

    def _say(self, name: str, line: str) -> None:
        """Log a line of a client; the same line of other clients only once."""
        if line not in self._logged:
            self._logged.add(line)
            self._log(f"{name}: {line}")

    def _check_memory(self, values: int) -> None:
        """Print how much memory all clients need. Raises UsageError if it is not there."""
        if self._is_sized:
            return
        self._is_sized = True
        clients = self._settings.clients
        need, have = least_bytes(values, clients), available_bytes()
        line = f"{clients} clients with {values:,} values each need about {need / 1e9:.2f} GB"
        if have is not None:
            line += f", and {have / 1e9:.1f} GB are available"
        if have is not None and need > have:
            raise UsageError(f"{line}: simulate fewer clients (--clients), or a smaller model")
        self._log(line)

    def _watch(
        self, server: SimulatedServer, _event: Event, effects: list[Effect], now: float
    ) -> None:
        """Record a version once it is durable, and what it has merged."""
        machine = server.machine
        newest = self._points[-1].version if self._points else -1
        if machine.version > newest:
            self._add_point(server, now)
        for effect in effects:
            if isinstance(effect, do.Average):
                self._merged = effect.merged

    def _add_point(self, server: SimulatedServer, now: float) -> None:
        machine, merged, sockets = server.machine, self._merged, server.traffic.sockets
        self._merged = ()
        for one in merged:
            part = self._parts[one.key.client]
            part.deltas += 1
            part.tokens += one.delta.tokens
            part.staleness += one.staleness
        held_out = loss_of(merged, "eval_loss")
        point = Point(
            machine.version,
            machine.digest,
            now / HOUR_S,
            machine.tokens_total,
            self._bytes[0] + sockets["up"],
            self._bytes[1] + sockets["down"],
            loss_of(merged, "loss"),
            held_out,
            len(merged),
        )
        self._points.append(point)
        self._progress(point)

    def _server_finished(self, effect: Finish) -> None:
        if effect.exit_code:
            self._error = self._error or RunDirError(effect.reason)
        self._calm = True
        self._reason = self._reason or effect.reason

    def _client_finished(self, name: str, error: BaseException | None) -> None:
        if error is not None and not self._reason:
            self._error = self._error or self._named(name, error)
        if name not in self._clients:
            return
        self._remove(name)
        self._ended.add(name)
        if len(self._ended) == len(self._parts) and not self._reason:
            self._end("all clients have ended")

    def _named(self, name: str, error: BaseException) -> BaseException:
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

    # --- processes ---

    def _next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def _launch_server(self) -> None:
        clock = ProcessClock(self._scheduler)
        self._server = SimulatedServer(self._server_site, clock, self._next_incarnation())
        self._server.start()

    def _launch_client(self, name: str) -> None:
        part = self._parts[name]
        part.launches += 1
        client = SimulatedClient(
            self._client_site,
            ProcessClock(self._scheduler),
            name,
            self._next_incarnation(),
            number=int(name[1:]),
            rate=part.rate,
        )
        self._clients[name] = client
        client.start()

    def _remove(self, name: str) -> bool:
        """End a client's process as kill -9 does; False if it does not run."""
        client = self._clients.pop(name, None)
        if client is None:
            return False
        part = self._parts[name]
        part.waited_s += client.thread.waited_s
        part.steps += client.training.meter.steps
        client.kill()
        return True

    # --- faults ---

    def _kill_client(self, name: str) -> None:
        if not self._calm and self._remove(name):
            self._counts.fault("client killed")
            self._at(
                self._chance.uniform(*self._profile.client_return_s), self._launch_client, name
            )
        self._plan(self._profile.client_kill_every_s, self._kill_client, name)

    def _kill_server(self) -> None:
        server = self._server
        if not self._calm and server is not None:
            self._counts.fault("server killed")
            self._bytes[0] += server.traffic.sockets["up"]
            self._bytes[1] += server.traffic.sockets["down"]
            self._server = None
            server.kill()
            self._at(self._chance.uniform(*self._profile.server_return_s), self._launch_server)
        self._plan(self._profile.server_kill_every_s, self._kill_server)

    def _reset(self, name: str) -> None:
        if name in self._clients and not self._calm:
            self._counts.fault("connection reset")
            self._network.reset(name, SERVER)
        self._plan(self._profile.reset_every_s, self._reset, name)

    def _cut(self, name: str) -> None:
        if self._calm:
            return
        self._counts.fault("partition")
        self._network.cut(name, SERVER)
        self._at(self._chance.uniform(*self._profile.partition_s), self._heal, name)

    def _heal(self, name: str) -> None:
        self._network.heal(name, SERVER)
        self._plan(self._profile.partition_every_s, self._cut, name)

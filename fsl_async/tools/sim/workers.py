"""One simulation in several processes, with the same result to the bit.

The parameter server is in the first process, and each client in one of the others, which are
forked. All advance together, by windows of virtual time that are no longer than the shortest delay
of a link: so what is sent in a window arrives in a later one, and the processes of a window need
nothing of each other (conservative simulation: Chandy and Misra, 1979). Messages that arrive at the
same time are ordered by their sender, not by what was computed first. With one worker all is in one
process, and runs by the same windows.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]

import fsl_async.errors
import fsl_transport as tp
from fsl_async.config.settings import Config
from fsl_async.errors import FslError, TaskRaisedError
from fsl_async.process.memory import peak_bytes
from fsl_async.tools.sim.result import ClientPart
from fsl_async.tools.sim.settings import SimulationSettings
from fsl_async.tools.sim.simulation import Simulation
from fsl_async.tools.sim.world import World

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LEAST_AHEAD_S = 0.001
"""Length of a window where links have no delay; then there is one process."""
ARRIVALS = 1 << 62
"""Arrivals come after the other calls of the same time."""
Message = tuple[float, str, str, int, int, int, Sequence[tp.Buffer]]
"""Arrival in s of virtual time, sender, receiver, lane, generation, number, frames."""
Note = tuple[float, str, str, Any]
"""Virtual time, client or "", kind, value."""


class WorkerNetwork(tp.MemNetwork):
    """The network as one process sees it; `outbox` holds the messages to nodes elsewhere."""

    def __init__(
        self, scheduler: tp.VirtualScheduler, seed: int, is_here: Callable[[str], bool]
    ) -> None:
        super().__init__(scheduler, seed)
        self.outbox: list[Message] = []
        self._virtual, self._seed, self._is_here = scheduler, seed, is_here
        self._chances: dict[tuple[str, str], random.Random] = {}
        self._sent: Counter[str] = Counter()
        self._ranks: dict[str, int] = {}

    def chance(self, source: str, target: str) -> random.Random:
        """See `MemNetwork.chance`: each direction has its own, whatever others send."""
        found = self._chances.get((source, target))
        if found is None:
            found = random.Random(f"{self._seed}/{source}/{target}")  # noqa: S311
            self._chances[source, target] = found
        return found

    def plan(  # noqa: PLR0917 - as in the class above
        self,
        when: float,
        source: str,
        to: str,
        path: Any,
        lane: tp.Lane,
        frames: Sequence[tp.Buffer],
    ) -> None:
        """See `MemNetwork.plan`."""
        self._sent[source] += 1
        message = when, source, to, int(lane), path.generation, self._sent[source], frames
        if self._is_here(to):
            self.deliver(message)
        else:
            self.outbox.append(message)

    def deliver(self, message: Message) -> None:
        """Have a message arrive at a node that is here."""
        when, source, to, lane, generation, number, frames = message
        # Names begin with a letter, and numbers follow: their bytes are a rank.
        rank = self._ranks.setdefault(source, int.from_bytes(source.encode(), "big") << 64)
        path = self.path(source, to)
        self._virtual.call_in_order(
            when, ARRIVALS + rank + number,
            self.arrive, source, to, path, generation, tp.Lane(lane), frames,
        )  # fmt: skip


class _Worker:
    """A forked process, as the first one sees it."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.next_s = 0.0
        """When something happens there next; infinity where nothing does."""
        self._pipe = pipe
        self._messages: list[Message] = []
        self.take_reply()

    def give(self, message: Message) -> None:
        """Have a message arrive there, with the next window."""
        self._messages.append(message)
        self.next_s = min(self.next_s, message[0])

    def run(self, end_s: float, *, calm: bool) -> None:
        """Run the window to `end_s`."""
        _send(self._pipe, [end_s, calm, self._messages])
        self._messages = []

    def take_reply(self) -> tuple[list[Message], list[list[Any]]]:
        """Return the messages and notes of the window."""
        try:
            self.next_s, messages, notes = _receive(self._pipe)
        except (EOFError, OSError):
            raise FslError(
                "a worker process of the simulation was killed, perhaps for its memory: simulate"
                " fewer clients, or with fewer --workers"
            ) from None
        return messages, notes

    def finish(self) -> tuple[int, dict[str, int], list[list[Any]]]:
        """End it; return its memory in bytes, its faults, and its clients' parts."""
        _send(self._pipe, None)
        memory, faults, parts = _receive(self._pipe)
        return memory, faults, parts

    def close(self) -> None:
        """Make sure that it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pipe.close()


class WindowedSimulation(Simulation):
    """A simulation that advances by windows, and whose clients may be in `workers` processes.

    delay_s: the shortest delay of a link. A subclass decides when it is over, and takes the notes
    of all processes.
    """

    network: WorkerNetwork
    parts: dict[str, ClientPart]
    """The part of each client in the run."""

    def __init__(
        self, settings: SimulationSettings, config: Config, workers: int, delay_s: float
    ) -> None:
        self._ahead_s = delay_s or LEAST_AHEAD_S
        self._worker_of: dict[str, int] = {}
        """Client -> number of its process; all others are in the first one, 0."""
        self._here = 0
        world = World(settings.profile, settings.seed)
        world.network = WorkerNetwork(world.scheduler, settings.seed, self._is_here)
        super().__init__(settings, world=world, config=config)
        if workers > 1:
            self._worker_of = {name: 1 + number % workers for number, name in enumerate(self.names)}
        self.worker_memory = 0
        """Bytes at most of the other processes, beyond what they share with this one."""
        self._workers: list[_Worker] = []
        self._notes: list[Note] = []
        self._chances: dict[tuple[str, str], random.Random] = {}
        self._wants_calm = False

    # --- for a subclass ---

    @property
    def is_over(self) -> bool:
        """Whether the simulation is over. Raises what ends it otherwise."""
        raise NotImplementedError

    def take(self, kind: str, name: str, value: Any) -> None:
        """Take a note. Raises what ended a client."""
        raise NotImplementedError

    # --- every process ---

    def note(self, kind: str, name: str, value: Any) -> None:
        """Have the first process take a note, at the end of the window."""
        self._notes.append((self.scheduler.time(), name, kind, value))

    def leave(self) -> None:
        """End the clients that are here."""
        for name in [name for name in self.processes if name != self.server]:
            self._kill(name)

    def _settle(self, *, calm: bool = False) -> bool:
        """Return whether there are no new faults from now on: the run is to end.

        Called between windows, so that faults end in all processes at the same time.
        """
        self._calm = self._calm or self._wants_calm or calm
        return self._calm

    def _is_here(self, name: str) -> bool:
        return self._worker_of.get(name, 0) == self._here

    def _is_up(self, name: str) -> bool:
        """See `Simulation`. Its process may be elsewhere."""
        return True

    def _chance_of(self, name: str, fault: str) -> random.Random:
        """See `Simulation`. Each process decides faults alike."""
        if (name, fault) not in self._chances:
            self._chances[name, fault] = self._rng(name, fault)
        return self._chances[name, fault]

    # --- the first process ---

    def play(self) -> None:
        """Play the simulation to its end. Raises what ends it."""
        if self._worker_of:
            self._fork()
        self.begin()
        while not self.is_over:
            times = [worker.next_s for worker in self._workers]
            if (here_s := self.scheduler.next_time()) is not None:
                times.append(here_s)
            if (next_s := min(times, default=math.inf)) == math.inf:
                return
            self._window(next_s + self._ahead_s)
        for worker in self._workers:
            memory, faults, parts = worker.finish()
            self.worker_memory += memory
            for kind, count in faults.items():
                self.counts.kinds[kind] = self.counts.kinds.get(kind, 0) + count
            for name, *done in parts:
                part = self.parts[name]
                part.steps, part.waited_s, part.launches = done

    def _window(self, end_s: float) -> None:
        calm = self._settle()
        busy = [worker for worker in self._workers if worker.next_s < end_s]
        for worker in busy:
            worker.run(end_s, calm=calm)
        self.scheduler.run_before(end_s)
        notes, self._notes = self._notes, []
        for worker in busy:
            messages, more = worker.take_reply()
            for message in messages:
                self.network.deliver(message)
            notes += [(at, name, kind, _unpacked(value)) for at, name, kind, value in more]
        for message in self.network.outbox:
            self._workers[self._worker_of[message[2]] - 1].give(message)
        self.network.outbox.clear()
        for _, name, kind, value in sorted(notes, key=lambda note: note[:3]):
            self.take(kind, name, value)

    def _fork(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in sorted(set(self._worker_of.values())):
            pipe, other = Pipe()
            pid = os.fork()
            if pid == 0:
                # With the other ends closed, the death of the first process ends this pipe.
                self._here, self._workers = number, []
                pipe.close()
                self._serve(other)
            other.close()
            self._workers.append(_Worker(pid, pipe))

    def end_workers(self) -> None:
        """End the other processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    # --- a forked process ---

    def _serve(self, pipe: Connection) -> None:
        """Simulate clients until the first process has what it needs, or is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
        before = peak_bytes()
        try:
            self.begin()
            while True:
                next_s = self.scheduler.next_time()
                self._reply(pipe, math.inf if next_s is None else next_s)
                command = _receive(pipe)
                if command is None:
                    break
                end_s, calm, arrived = command
                self._settle(calm=calm)
                for message in arrived:
                    self.network.deliver(tuple(message))
                self.scheduler.run_before(end_s)
            self.leave()
            parts = [
                [one.name, one.steps, one.waited_s, one.launches]
                for one in self.parts.values()
                if one.launches
            ]
            _send(pipe, [peak_bytes() - before, self.counts.kinds, parts])
        except EOFError:
            pass
        except BaseException as error:  # noqa: BLE001 - the first process raises it
            self.note("failed", "", error)
            with contextlib.suppress(OSError):
                self._reply(pipe, 0.0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _reply(self, pipe: Connection, next_s: float) -> None:
        """Send the messages and notes of a window, and when something happens here next."""
        notes = [(at, name, kind, _packed(value)) for at, name, kind, value in self._notes]
        _send(pipe, [next_s, self.network.outbox, notes])
        self._notes = []
        self.network.outbox.clear()


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(msgpack.packb(value))


def _receive(pipe: Connection) -> Any:
    return msgpack.unpackb(pipe.recv_bytes())


def _packed(value: Any) -> Any:
    if not isinstance(value, BaseException):
        return value
    if isinstance(value, FslError):
        return [type(value).__name__, value.message, getattr(value, "trace", "")]
    return ["", "".join(traceback.format_exception(value)), ""]


def _unpacked(value: Any) -> Any:
    """Return a note's text, or an exception that a worker has met."""
    if not isinstance(value, list):
        return value
    kind, text, trace = value
    if trace:
        return TaskRaisedError(text, trace)
    return getattr(fsl_async.errors, kind, FslError)(text) if kind else RuntimeError(text)

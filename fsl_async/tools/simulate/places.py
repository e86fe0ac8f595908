"""One simulation in several processes, with the same result to the bit.

The parameter server is in the first place, and each client in one of the others, which are forked
processes. All advance together, by windows of virtual time that are no longer than the shortest
delay of a link: so what is sent in a window arrives in a later one, and the processes of a window
need nothing of each other (conservative simulation: Chandy and Misra, 1979). Messages that arrive
at the same time are ordered by their sender, not by who computed first. With one worker all is in
one place, and runs by the same windows.

`Residents` keeps the models of clients that do not run as vectors in files. A client's tensors are
the trained parameters of the module that it attached, their gradients, and the state of the
optimizers that stepped in its thread. Where more clients than `limit` hold theirs, the content of
those that ran longest ago moves to one file each, and its memory is given back; before a client
runs, its content is back to the bit. The tensors stay the same objects. Others stay where they are:
frozen weights and buffers, which clients may share, data that the function keeps, and memory that
is not torch's alone (`torch.from_numpy`, `.numpy()`, mapped, shared, of a GPU).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import torch
from attrs import field, mutable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import fsl_async.errors
import fsl_transport as tp
from fsl_async.errors import FslError, TaskRaisedError
from fsl_async.process.memory import peak_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from fsl_async.tools.simulate.simulation import OwnSimulation


@mutable(eq=False)
class Model:
    """The tensors of one client. file: where their content is while it is out."""

    file: Path
    module: nn.Module | None = None
    optimizers: weakref.WeakSet[Optimizer] = field(factory=weakref.WeakSet)
    moved: list[tuple[torch.UntypedStorage, int]] = field(factory=list)
    """Memory that is out, and its bytes."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that can move."""
        if self.module is not None:
            for one in self.module.parameters():
                if one.requires_grad:
                    yield one
                if one.grad is not None:
                    yield one.grad
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (one for one in state.values() if isinstance(one, Tensor))

    def move_out(self) -> None:
        """Write the content to the file, and give its memory back."""
        found = {}
        for tensor in self.tensors():
            if tensor.layout is torch.strided and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.resizable() and not storage.is_shared():
                    found[storage.data_ptr()] = storage
        self.moved = [(storage, storage.nbytes()) for storage in found.values()]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for (storage, _), place in self._places():
            place.copy_(_bytes_of(storage))
            storage.resize_(0)

    def move_in(self) -> None:
        """Bring the content back."""
        for (storage, size), place in self._places():
            storage.resize_(size)
            _bytes_of(storage).copy_(place)
        self.moved = []

    def _places(self) -> Iterator[tuple[tuple[torch.UntypedStorage, int], Tensor]]:
        """Yield each memory that moves, and its place in the file, uint8 (bytes,)."""
        sizes = [size for _, size in self.moved]
        if sizes:
            content = torch.from_file(
                str(self.file), shared=True, size=sum(sizes), dtype=torch.uint8
            )
            parts = content.split(sizes)  # type: ignore[no-untyped-call]
            yield from zip(self.moved, parts, strict=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Residents:
    """The models of all clients. limit: of those that are in place; None: all of them."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.limit = limit
        self._folder = folder
        self._models: dict[str, Model] = {}
        self._inside: dict[str, Model] = {}
        """Models in place, from the one that ran longest ago."""
        self._running: Model | None = None
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def attached(self, module: nn.Module) -> None:
        """Take the module that the running client has attached."""
        assert self._running is not None, "a client attaches while it runs"
        self._running.module = module

    def enter(self, name: str) -> None:
        """Bring a client's model in place, before it runs."""
        model = self._models.setdefault(name, Model(self._folder / name / "model"))
        self._running = model
        self._inside.pop(name, None)
        self._inside[name] = model
        while self.limit is not None and len(self._inside) > self.limit:
            self._inside.pop(next(iter(self._inside))).move_out()
        model.move_in()

    def forget(self, name: str) -> None:
        """Forget a client's process that has ended."""
        self._models.pop(name, None)
        self._inside.pop(name, None)

    def close(self) -> None:
        """Look at optimizers no longer."""
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._running is not None:
            self._running.optimizers.add(optimizer)


LEAST_AHEAD_S = 0.001
"""Length of a window where links have no delay; then there is one place."""
ARRIVALS = 1 << 62
"""Arrivals come after the other calls of the same time."""
Message = tuple[float, str, str, int, int, int, Sequence[tp.Buffer]]
"""Arrival in s of virtual time, sender, receiver, lane, generation, number, frames."""


class PlacedNetwork(tp.MemNetwork):
    """The network as one place sees it; `outbox` holds the messages to processes elsewhere."""

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
        """Have a message arrive at a process that is here."""
        when, source, to, lane, generation, number, frames = message
        # Names begin with a letter, and numbers follow: their bytes are a rank.
        rank = self._ranks.setdefault(source, int.from_bytes(source.encode(), "big") << 64)
        path = self.path(source, to)
        self._virtual.call_in_order(
            when, ARRIVALS + rank + number,
            self.arrive, source, to, path, generation, tp.Lane(lane), frames,
        )  # fmt: skip


class _Worker:
    """A forked place, as the first one sees it."""

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

    def finish(self) -> dict[str, Any]:
        """End it; return its part of the result."""
        _send(self._pipe, None)
        found: dict[str, Any] = _receive(self._pipe)
        return found

    def close(self) -> None:
        """Make sure that it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pipe.close()


class Places:
    """The places of a simulation; `run` plays it in windows."""

    def __init__(self, own: OwnSimulation, workers: int) -> None:
        self.memory = 0
        """Bytes at most of the other places, beyond what they share with this one."""
        self._own, self._count = own, workers
        self._here = 0
        self._workers: list[_Worker] = []
        self._notes: list[tuple[float, str, str, Any]] = []
        self._where: dict[str, int] = {}

    def is_here(self, name: str) -> bool:
        """Whether a process belongs to this place."""
        if self._count == 1:
            return True
        if not self._where:
            self._where = {
                name: 1 + number % self._count for number, name in enumerate(self._own.names)
            }
        return self._where.get(name, 0) == self._here

    def note(self, kind: str, name: str, value: Any) -> None:
        """Tell the first place, at the end of the window."""
        self._notes.append((self._own.scheduler.time(), name, kind, value))

    # --- the first place ---

    def run(self) -> None:
        """Play the simulation. Raises what ends it."""
        own = self._own
        network = own.network
        assert isinstance(network, PlacedNetwork)
        ahead_s = own.shortest_delay_s or LEAST_AHEAD_S
        if self._count > 1:
            self._fork()
        own.begin()
        while not own.is_over:
            here_s = own.scheduler.next_time()
            next_s = min([worker.next_s for worker in self._workers], default=float("inf"))
            next_s = next_s if here_s is None else min(next_s, here_s)
            if next_s == float("inf"):
                return
            self._window(network, next_s + ahead_s)
        for worker in self._workers:
            own.add(found := worker.finish())
            self.memory += int(found["memory"])

    def _window(self, network: PlacedNetwork, end_s: float) -> None:
        own, calm = self._own, self._own.settle()
        busy = [worker for worker in self._workers if worker.next_s < end_s]
        for worker in busy:
            worker.run(end_s, calm=calm)
        own.scheduler.run_before(end_s)
        notes, self._notes = self._notes, []
        for worker in busy:
            messages, more = worker.take_reply()
            for message in messages:
                network.deliver(message)
            notes += [(at, name, kind, _unpacked(value)) for at, name, kind, value in more]
        for message in network.outbox:
            self._workers[self._where[message[2]] - 1].give(message)
        network.outbox.clear()
        for _, name, kind, value in sorted(notes, key=lambda note: note[:3]):
            own.take(kind, name, value)

    def _fork(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in range(1, self._count + 1):
            pipe, other = Pipe()
            pid = os.fork()
            if pid == 0:
                # With the other ends closed, the death of the first place is the end of this pipe.
                self._here, self._workers = number, []
                pipe.close()
                _serve(self._own, self, other)
            other.close()
            self._workers.append(_Worker(pid, pipe))

    def close(self) -> None:
        """End the other places."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def take_notes(self) -> list[tuple[float, str, str, Any]]:
        """Return the notes of a window, as they are sent."""
        notes, self._notes = self._notes, []
        return [(at, name, kind, _packed(value)) for at, name, kind, value in notes]


def _serve(own: OwnSimulation, places: Places, pipe: Connection) -> None:
    """Be a forked place until the first one has what it needs, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first place ends this one
    before = peak_bytes()
    network = own.network
    assert isinstance(network, PlacedNetwork)
    try:
        own.begin()
        while True:
            next_s = own.scheduler.next_time()
            next_s = float("inf") if next_s is None else next_s
            _send(pipe, [next_s, network.outbox, places.take_notes()])
            network.outbox.clear()
            command = _receive(pipe)
            if command is None:
                break
            end_s, calm, arrived = command
            own.settle(calm=calm)
            for message in arrived:
                network.deliver(tuple(message))
            own.scheduler.run_before(end_s)
        own.leave()
        _send(pipe, own.part_here() | {"memory": peak_bytes() - before})
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - the first place raises it
        places.note("failed", "", error)
        with contextlib.suppress(OSError):
            _send(pipe, [0.0, [], places.take_notes()])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


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
    """Return a note's text, or an exception that a place has met."""
    if not isinstance(value, list):
        return value
    kind, text, trace = value
    if trace:
        return TaskRaisedError(text, trace)
    return getattr(fsl_async.errors, kind, FslError)(text) if kind else RuntimeError(text)

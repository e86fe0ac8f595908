"""The shell of a gang: connections of ranks in, directives out. Does not import torch.

It runs in the node's main thread, where a client of one process trains. It takes orders of the
exchange side one by one, as `learn.client.training` does, and has the ranks carry them out; while
it waits for them it goes on to serve connections.
"""

import contextlib
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]

from fsl_async.errors import FslError
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import (
    Move,
    Moved,
    Order,
    RebaseOrder,
    RoundOrder,
    SnapshotOrder,
    Vector,
    Work,
)
from fsl_async.learn.client.schedule import RunClock
from fsl_async.learn.gang.link import Link, Slots, read_back, user_of
from fsl_async.nodes.client.gang_meter import GangMeter
from fsl_async.nodes.runtime import Journal, Node
from fsl_async.roles import gang
from fsl_async.roles import gang_messages as msg
from fsl_async.roles.machine import Effect, Event, Note, Received
from fsl_async.roles.messages import Message, MessageError
from fsl_async.roles.sync.delta import POSITION
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import MAX_TENSORS, Manifest

SLOTS = 3
"""Base, reference and a snapshot; a full fetch, and global weights, take a fourth and a fifth."""
MOST_MANIFEST = 64 << 20
MOST_RANGES = 4 * MAX_TENSORS
MOST_CONNECTIONS = 4096
TURN_S = 0.5


class GangClock(RunClock):
    """The run's position, passed on to the ranks."""

    def __init__(self, tell: Callable[[RunPosition], None]) -> None:
        super().__init__()
        self._tell = tell

    def announced(self, position: RunPosition) -> None:
        """Continue from a position that the parameter server announced just now."""
        super().announced(position)
        self._tell(position)


class GangShell:
    """The training side of a client, in other processes: a `TrainingPort` and a `TrainingSide`.

    world: ranks of the gang; 0: as many as the first one says. say: takes a line of text. The main
    thread calls `connect`, then `turn` and `carry_out`; other threads call what says so.
    """

    def __init__(self, world: int, say: Callable[[str], None]) -> None:
        self.meter = GangMeter()
        self.clock = GangClock(lambda position: self._post(gang.Told(msg.Position(0, position))))
        self.stopped = False
        self.all_ended = False
        """Whether training has returned in all ranks."""
        self.failure: tuple[str, int] | None = None
        """A line, and the exit code: no ranks train here any more."""
        self.slots = Slots()
        self.machine = gang.GangMachine(world, now=time.monotonic())
        self.on_position: Callable[[dict[str, float]], None] = lambda _: None
        """Called, in the main thread, with the position in the data that a delta ends at."""
        self.is_leaving: Callable[[], bool] = lambda: False
        """Whether this client was asked to end, when training stops. For any thread."""
        self._say = say
        self._exchange: Exchange
        self._is_over: Callable[[], bool] = lambda: False
        self._orders: deque[Order] = deque()
        self._orders_lock = threading.Lock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._woken = wake
        self._wake.setblocking(False)
        wake.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, self._drain)
        self._links: dict[str, Link] = {}
        self._connections = 0
        self._manifests: dict[str, Manifest] = {}
        self._known_slots: set[int] = set()
        self._scratch: Vector | None = None
        self._due: tuple[float, Callable[..., object]] | None = None
        self._waits = False  # for the answer to an order
        self._answer: msg.Done | None = None
        self._moving: tuple[int, int] | None = None  # version and slot of the base, while held
        self._attaches = ""  # fingerprint of a gang that has attached
        self._reads = False  # whether the ranks wait for the base
        self._is_reading = False
        self._takes = False  # whether the gang's first move is still to come

    def connect(
        self,
        exchange: Exchange,
        listening: socket.socket,
        is_over: Callable[[], bool],
        journal: Journal,
    ) -> None:
        """Serve ranks that come to a socket. is_over: whether the loop's thread has ended."""
        self._exchange, self._is_over = exchange, is_over
        self.node = Node(self.machine, self, self._execute, journal)
        self._selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))

    def watch(self, file: int, ended: Callable[[], None]) -> None:
        """Call `ended` once a descriptor can be read."""

        def seen() -> None:
            self._selector.unregister(file)
            ended()

        self._selector.register(file, selectors.EVENT_READ, seen)

    # --- any thread: `TrainingPort` ---

    def ask(self, order: Order) -> None:
        """Have the ranks carry out an order; a snapshot only once."""
        with self._orders_lock:
            if isinstance(order, SnapshotOrder) and order in self._orders:
                return
            self._orders.append(order)
        self._groups()

    def resume(self) -> None:
        """Let the ranks train on after an order that held them."""
        self._post(gang.Told(msg.Resume(0)))

    def count_steps(self, steps: int) -> None:
        """Have the ranks report so many steps after each snapshot; 0: not."""
        self._post(gang.Told(msg.Pace(0, steps)))

    def stop(self) -> None:
        """End training at the next agreed step."""
        if not self.stopped:
            self.stopped = True
            self._post(gang.Told(msg.Stop(0, self.is_leaving())))

    def refuse(self, code: str, text: str) -> None:
        """End `attach` in all ranks with RefusedError."""
        self._post(gang.Told(msg.Refuse(0, code, text)))

    def welcomed(self, context: bytes) -> None:
        """The parameter server's welcome is here."""
        self._post(gang.ContextKnown(context))

    def _post(self, event: Event) -> None:
        self._events.put(event)
        self._groups()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _groups(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it needs nothing
            self._wake.send(b"!")

    # --- main thread ---

    @property
    def has_work(self) -> bool:
        """Whether `carry_out` has something to do."""
        return bool(self._attaches or self._reads or self._orders)

    def carry_out(self) -> None:
        """Do the next thing that needs the exchange side, and wait for the ranks."""
        if self._attaches:
            self._attach()
        elif self._reads:
            self._give_base()
        elif self._orders:
            with self._orders_lock:
                order = self._orders.popleft()
            match order:
                case RebaseOrder(discard):
                    self._exchange.rebase(self._move, discard=discard or self._takes)
                case SnapshotOrder(sequence, hold):
                    self._snapshot(sequence, lambda slot: msg.Snapshot(0, sequence, slot, hold))
                case RoundOrder(sequence, number):
                    self._snapshot(sequence, lambda slot: msg.Round(0, sequence, slot, number))

    def turn(self) -> None:
        """Wait for something, and handle it."""
        due = self._due
        left = TURN_S if due is None else min(TURN_S, max(0.0, due[0] - self.time()))
        for key, _ in self._selector.select(left):
            key.data()
        while not self._events.empty():
            self.node.feed(self._events.get())
        if due is not None and due is self._due and self.time() >= due[0]:
            self._due = None
            due[1]()

    # `Scheduler`, with the one timer of the node, which is its own handle.

    def time(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> "GangShell":
        """Have `turn` call `callback` once at `when`, or later."""
        self._due = when, callback
        return self

    def cancel(self) -> None:
        """Leave the call out."""
        self._due = None

    def release(self, seconds: float) -> None:
        """Tell the ranks that they may end, and wait until they have."""
        if self.machine.has_gang or self._links:
            self.node.feed(gang.Told(msg.Stop(0, self.is_leaving())))
            self.node.feed(gang.Told(msg.Leave(0)))
        deadline = time.monotonic() + seconds
        while self._links and time.monotonic() < deadline:
            self.turn()

    def close(self) -> None:
        """Close all connections, and give the memory back."""
        for peer in list(self._links):
            self._close(peer)
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self.slots.close()

    # --- orders ---

    def _snapshot(self, sequence: int, order: Callable[[int], msg.Directive]) -> None:
        vector = self._exchange.free_vector(self.machine.values)
        directive = order(self._known(vector))
        done = self._ordered(directive)
        if done is None:  # some of the ranks are gone: what is in the vector is no snapshot
            self.slots.retire(vector)
            done = msg.Done(0)
        if getattr(directive, "hold", True):
            self.meter.waits()  # the ranks wait now
        self.meter.sent_tokens += done.tokens
        facts = {name: float(fact) for name, fact in done.facts.items()}
        if position := {name: facts[name] for name in POSITION if name in facts}:
            self.on_position(position)
        work = Work(done.tokens, done.steps, dict(done.metrics), done.finite, facts)
        self._exchange.put_snapshot(sequence, vector, work)

    def _move(self, move: Move) -> Moved:
        """Have the ranks move. Without ranks the model is the base: the next ones begin there."""
        how = "take" if self._takes else move.how
        self._moving = move.version, self._known(move.base)
        try:
            order = msg.Move(0, move.version, how, self._moving[1], self._known(move.reference))
            done = self._ordered(order)
        finally:
            self._moving = None
        if done is None:
            return Moved(taken=True)
        self._takes = False
        return Moved(taken=done.taken, dropped_tokens=done.dropped)

    def _attach(self) -> None:
        """A gang has a model: its weights are the run's first ones, or it gets those of the run."""
        fingerprint, self._attaches = self._attaches, ""
        manifest = next(iter(self._manifests.values()), None)
        own, self._scratch = self._scratch, None
        if manifest is None or manifest.fingerprint != fingerprint or own is None:
            self.fail("rank 0 has sent no manifest of its model", 2)
            return
        known = self._exchange.manifest
        self._takes = True
        if known is None:
            self._exchange.attach(manifest, own)
        elif known.fingerprint != fingerprint:
            difference = manifest.difference(known)
            self.fail(f"the ranks that came back have another model: {difference}", 2)
        else:
            self._exchange.restart(self._move)

    def _give_base(self) -> None:
        self._reads, self._is_reading = False, True

        def give(version: int, slot: int) -> None:
            self.node.feed(gang.Told(msg.Base(0, version, slot)))

        if self._moving is not None:  # it is held already, and the order waits for this
            give(*self._moving)
            return

        def use(base: Vector, version: int) -> None:
            give(version, self._known(base))
            while self._is_reading and not self._is_over():
                self.turn()

        if not self._exchange.use_base(use):
            give(-1, 0)

    def _ordered(self, order: msg.Directive) -> msg.Done | None:
        """Have all ranks carry out an order; None where one was lost meanwhile."""
        self._answer, self._waits = None, True
        self.node.feed(gang.Asked(order))
        while self._waits and not self._is_over():
            if self._reads:
                self._give_base()
            self.turn()
        self._waits = False
        return self._answer

    def _known(self, vector: Vector) -> int:
        """The number of a vector's slot, which the ranks get first if they do not have it."""
        slot = self.slots.number_of(vector)
        if slot not in self._known_slots and self.machine.has_gang:
            self._tell_slots([slot])
        return slot

    def _tell_slots(self, slots: list[int]) -> None:
        self._known_slots.update(slots)
        self.node.feed(gang.Told(msg.Slots(0, slots)))

    # --- connections ---

    def _accept(self, listening: socket.socket) -> None:
        try:
            connected, _ = listening.accept()
        except OSError:
            return
        if user_of(connected) != os.getuid() or len(self._links) >= MOST_CONNECTIONS:
            connected.close()
            return
        self._connections += 1
        peer = str(self._connections)
        connected.setblocking(True)
        self._links[peer] = Link(connected, msg.FROM_RANKS, msg.FROM_NODE)
        self._selector.register(connected, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        try:
            found = link.receive(waits=False)
            if found is not None:
                self._received(peer, *found)
        except (EOFError, OSError) as error:
            self._lost(peer, str(error))
        except (MessageError, ManifestError, ValueError) as error:
            self._lost(peer, f"it broke the protocol: {error}")

    def _received(self, peer: str, message: Message, files: list[int]) -> None:
        attached = message if isinstance(message, msg.Attached) and len(files) == 1 else None
        if attached is None:
            for file in files:
                os.close(file)
        match message:
            case msg.Attached(fingerprint):
                if attached is None:
                    raise MessageError("Attached has one descriptor")
                ranges = self._read_attached(peer, files[0])
                self.node.feed(gang.RankAttached(peer, fingerprint, ranges))
            case msg.Beat(report):
                self._reported(peer, report)
            case msg.PaceReached():
                if self.machine.has_gang:
                    self._exchange.reach_pace()
            case _:
                self.node.feed(Received(peer, message))

    def _read_attached(self, peer: str, file: int) -> tuple[gang.Range, ...]:
        body: Any = msgpack.unpackb(read_back(file, MOST_MANIFEST))
        match body:
            case {"manifest": list(manifest), "frozen": list(frozen), "ranges": list(ranges)}:
                pass
            case _:
                raise MessageError("Attached has a manifest, frozen and ranges")
        if manifest:
            self._manifests = {peer: Manifest.from_wire(manifest, frozen)}
        found = []
        for one in ranges[:MOST_RANGES]:
            match one:
                case [int() as start, int() as stop] if 0 <= start < stop:
                    found.append((start, stop))
                case _:
                    raise MessageError("a range is [start, stop]")
        return tuple(found)

    def _reported(self, peer: str, report: dict[str, Any]) -> None:
        numbers = {
            name: float(value) for name, value in report.items() if isinstance(value, int | float)
        }
        rank = self.machine.rank_of(peer)
        if rank is not None:
            self.meter.reported(rank, numbers)

    def _lost(self, peer: str, reason: str) -> None:
        self._close(peer)
        self.node.feed(gang.RankLost(peer, reason or "closed"))

    def _close(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._selector.unregister(link)
            link.close()

    # --- the machine ---

    def _execute(self, effect: Effect, number: int) -> None:  # noqa: C901 - a table
        match effect:
            case gang.Direct(peers, directive):
                self._direct(peers, directive)
            case gang.Drop(peer, reason):
                if reason:
                    self._say(f"a rank is sent away: {reason}")
                self._close(peer)
            case Note(text):
                self._say(text)
            case gang.MakeSlots(values):
                self._make_slots(values)
            case gang.GangAttached(fingerprint, world):
                self._attaches = fingerprint
                self._say(f"all {world} ranks are here")
            case gang.Answered(done):
                self._answer, self._waits = done, False
            case gang.Unanswered():
                self._waits = False
            case gang.ReadBase():
                self._reads = True
            case gang.BaseRead():
                self._reads = self._is_reading = False
            case gang.GangLost(reason, _):
                self._gang_lost(reason)
            case gang.AllEnded():
                self.all_ended = True
                self.meter.waits()
            case gang.Failed(text, code):
                self.fail(text, code)
            case gang.GaveUp(text):
                self.fail(text, 1)

    def fail(self, text: str, code: int) -> None:
        """No ranks train here any more; the first reason counts."""
        self.failure = self.failure or (text, code)

    def _direct(self, peers: Sequence[str], directive: msg.Directive) -> None:
        slots = directive.slots if isinstance(directive, msg.Slots) else []
        files = [self.slots.file(slot) for slot in slots]
        for peer in peers:
            link = self._links.get(peer)
            if link is None:
                continue
            try:
                link.send(directive, files, waits=False)
            except OSError as error:  # it is gone, or has not read for long
                self._lost(peer, str(error))

    def _make_slots(self, values: int) -> None:
        try:
            self.slots.restore()
            self.slots.reserve(values, SLOTS)
            self._scratch = self._exchange.free_vector(values)
        except FslError as error:
            self.fail(error.message, error.exit_code)
            return
        own = self.slots.number_of(self._scratch)
        others = [slot for slot in range(self.slots.count) if slot != own]
        self._known_slots = set()
        self._tell_slots([own, *others])

    def _gang_lost(self, reason: str) -> None:
        gone = self.meter.lost()
        if self._scratch is not None:
            self.slots.retire(self._scratch)
        self._attaches, self._scratch, self._takes = "", None, True
        self._known_slots = set()
        if not self.all_ended and self.failure is None:
            self._say(
                f"{reason}: {gone:,} tokens since the last delta are lost; the weights are kept"
                f" here for {gang.WAIT_S:g} s, until torchrun starts the ranks again"
            )

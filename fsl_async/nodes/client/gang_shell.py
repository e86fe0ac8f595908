"""The node's side of a gang: the ranks of one client, which train in processes of a torchrun.

It runs in the node's main thread, where a client of one process trains, and does not import torch.
It takes orders of the exchange side one by one, as `learn.client.training` does, and has the ranks
carry them out; while it waits for them it goes on to serve connections.

A gang begins with the hello of its rank 0, once all ranks have found each other, and ends with the
first connection of its ranks that closes. Work since its last snapshot is then lost, and the order
in flight is answered with nothing, for a snapshot of some ranks is none: what was answered is
whole, and the node's. Without ranks the model is the base: rebases go on, and the next gang takes
it. What holds for good (welcome, stop, refusal, the last position and pace) is sent to a new gang
again. Without a gang for WAIT_S the node gives up.

    message of rank 0   what it means                              answer
    hello               all ranks are here (of others: one is)     what holds for good
    shape               the model has so many values               slots
    attached            first weights are in the first slot        move, or as the run goes
    beat                what the ranks have done
    pace_reached        progress is to be sent
    snapshot            the order is carried out, with its counts
    moved               the order is carried out
    want_base           all ranks wait for the base                base
    base_read           they have read it
    ended               training has returned in all ranks
    failed              an error, of any rank, that would come again
"""

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from fsl_async.errors import FslError
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import (
    NO_VERSION,
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
from fsl_async.learn.gang.link import Link, Slots
from fsl_async.observe.journal import JournalWriter, TraceHash
from fsl_async.roles.sync.delta import POSITION
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest

SLOTS = 3
"""Base, reference and a snapshot; a full fetch, and global weights, take a fourth and a fifth."""
MOST_CONNECTIONS = 4096
TURN_S = 0.5
WAIT_S = 1800.0
"""How long a node waits for ranks. It sees when torchrun ends; until then a script may load for
long before it joins."""
TIMES_KEPT = 64


class GangMeter:
    """Counts over all gangs of a node; the interface of `learn.client.meter.Meter`.

    A step, for the watch of steps that hang, is the time between two reports.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.sent_tokens = 0
        """How many of the tokens are in a snapshot."""
        self.step_begun: float | None = None
        self.step_times: deque[float] = deque(maxlen=TIMES_KEPT)
        self._before = (0, 0)  # steps and tokens of the gangs before
        self._report: Mapping[str, float] = {}

    @property
    def waited_s(self) -> float:
        """Seconds of waiting, which ranks do not report: 0."""
        return 0.0

    def reported(self, report: Mapping[str, float]) -> None:
        """Take the totals and means of all ranks together."""
        self._report = report
        now = time.monotonic()
        if self.step_begun is not None:
            self.step_times.append(now - self.step_begun)
        self.step_begun = now
        self.steps = self._before[0] + int(report["step"])
        self.tokens = self._before[1] + int(report["tokens"])

    def waits(self) -> None:
        """The ranks wait for their node, or are not there."""
        self.step_begun = None

    def lost(self) -> int:
        """The gang is gone; returns how many of its tokens were sent by none of its snapshots."""
        gone = max(0, self.tokens - self.sent_tokens)
        self._before = (self.steps, self.tokens)
        self.sent_tokens = self.tokens
        self._report = {}
        self.step_begun = None
        return gone

    def totals(self) -> dict[str, float]:
        """Counts alone."""
        counts = {"tokens_per_s": 0.0, **self._report}
        found = {"step": float(self.steps), "tokens": float(self.tokens)}
        names = ("tokens_per_s", "left_out", "not_finite")
        return found | {name: counts[name] for name in names if name in counts}

    def report(self) -> dict[str, float]:
        """The totals, and of each metric the mean of the ranks."""
        return {**self._report, **self.totals()}


class GangClock(RunClock):
    """The run's position, passed on to the ranks."""

    def __init__(self, tell: Callable[[RunPosition], None]) -> None:
        super().__init__()
        self._tell = tell

    def announced(self, position: RunPosition) -> None:
        """Continue from a position that the parameter server announced just now."""
        super().announced(position)
        self._tell(position)


@attrs.define(eq=False)
class _Gang:
    """The present gang."""

    link: Link
    world: int
    generation: int
    is_attached: bool = False
    order: bool = False
    """Whether one is in flight."""


class GangShell:
    """The training side of a client, in other processes: a `TrainingPort` and a `TrainingSide`.

    say: takes a line of text. The main thread calls `connect`, then `turn` and `carry_out`; other
    threads call what says so.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.meter = GangMeter()
        self.clock = GangClock(lambda now: self._post("position", attrs.asdict(now)))
        self.stopped = False
        self.all_ended = False
        """Whether training has returned in all ranks."""
        self.failure: tuple[str, int] | None = None
        """A line, and the exit code: no ranks train here any more."""
        self.slots = Slots()
        self.on_position: Callable[[dict[str, float]], bytes] = lambda _: b""
        """Called with the position in the data that a delta ends at, for the welcome of the ranks
        that start again."""
        self.is_leaving: Callable[[], bool] = lambda: False
        """Whether this client was asked to end, when training stops. For any thread."""
        self._say = say
        self._exchange: Exchange
        self._journal: JournalWriter | TraceHash
        self._is_over: Callable[[], bool] = lambda: False
        self._orders: deque[Order] = deque()
        self._orders_lock = threading.Lock()
        self._posted: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._links: dict[Link, tuple[int, int]] = {}
        """Connections, with the rank and the generation of their hello; -1: none has come."""
        self._gang: _Gang | None = None
        self._gives_up_at = time.monotonic() + WAIT_S
        self._lasting: dict[str, tuple[Any, ...]] = {}  # what holds for good, in order
        self._values = 0  # of the model, which all gangs of this node must have
        self._manifest: Manifest | None = None  # of a gang that has attached, for `carry_out`
        self._known_slots: set[int] = set()
        self._scratch: Vector | None = None
        self._answer: list[Any] | None = None  # to the order in flight
        self._moving: tuple[int, int] | None = None  # version and slot of the base, while held
        self._wants_base = False
        self._is_reading = False
        self._takes = False  # whether the gang's first move is still to come
        self._handlers: dict[str, Callable[..., None]] = {
            "shape": self._make_slots,
            "attached": self._attached,
            "beat": self.meter.reported,
            "pace_reached": self._pace_reached,
            "snapshot": self._answered,
            "moved": self._answered,
            "want_base": self._base_wanted,
            "base_read": self._base_read,
            "ended": self._ended,
        }

    def connect(
        self,
        exchange: Exchange,
        listening: socket.socket,
        is_over: Callable[[], bool],
        journal: JournalWriter | TraceHash,
    ) -> None:
        """Serve ranks that come to a socket. is_over: whether the loop's thread has ended."""
        self._exchange, self._is_over, self._journal = exchange, is_over, journal
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
        self._wake_up()

    def resume(self) -> None:
        """Let the ranks train on after an order that held them."""
        self._post("resume")

    def count_steps(self, steps: int) -> None:
        """Have the ranks report so many steps after each snapshot; 0: not."""
        self._post("pace", steps)

    def stop(self) -> None:
        """End training at the next agreed step."""
        if not self.stopped:
            self.stopped = True
            self._post("stop", self.is_leaving())

    def refuse(self, code: str, text: str) -> None:
        """End `attach` in all ranks with RefusedError."""
        self._post("refuse", code, text)

    def welcomed(self, context: bytes) -> None:
        """The parameter server's welcome is here."""
        self._post("welcome", context)

    def _post(self, name: str, *values: object) -> None:
        self._posted.put((name, *values))
        self._wake_up()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it needs nothing
            self._wake.send(b"!")

    # --- main thread ---

    @property
    def has_work(self) -> bool:
        """Whether `carry_out` has something to do."""
        return bool(self._manifest or self._wants_base or self._orders)

    def carry_out(self) -> None:
        """Do the next thing that needs the exchange side, and wait for the ranks."""
        if self._manifest:
            self._attach(self._manifest)
        elif self._wants_base:
            self._give_base()
        elif self._orders:
            with self._orders_lock:
                order = self._orders.popleft()
            match order:
                case RebaseOrder(discard):
                    self._exchange.rebase(self._move, discard=discard)
                case SnapshotOrder(sequence, hold):
                    self._snapshot("snapshot", sequence, hold, holds=hold)
                case RoundOrder(sequence, number):
                    self._snapshot("round", sequence, number, holds=True)

    def turn(self) -> None:
        """Wait for something, and handle it."""
        for key, _ in self._selector.select(TURN_S):
            key.data()
        while not self._posted.empty():
            self._tell(*self._posted.get())
        if self._gang is None and time.monotonic() >= self._gives_up_at:
            self.fail(f"no ranks came within {WAIT_S:g} s", 1)

    def release(self, seconds: float) -> None:
        """Tell the ranks that they may end, and wait until they have."""
        self._tell("stop", self.is_leaving())
        self._tell("leave")
        deadline = time.monotonic() + seconds
        while self._links and time.monotonic() < deadline:
            self.turn()

    def close(self) -> None:
        """Close all connections, and give the memory back."""
        for link in list(self._links):
            self._close(link)
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self.slots.close()

    def fail(self, text: str, code: int) -> None:
        """No ranks train here any more; the first reason counts."""
        self.failure = self.failure or (text, code)

    # --- orders ---

    def _snapshot(self, name: str, sequence: int, more: object, *, holds: bool) -> None:
        vector = self._exchange.free_vector(self._values)
        answer = self._ordered(name, sequence, self._number_of(vector), more)
        if answer is None:  # some of the ranks are gone: what is in the vector is no snapshot
            self.slots.retire(vector)
            work = Work(0, 0, {}, finite=True)
        else:
            work = Work(**answer[0])
        if holds:
            self.meter.waits()  # the ranks wait now
        self.meter.sent_tokens += work.tokens
        position = {name: work.facts[name] for name in POSITION if name in work.facts}
        if position:
            self._lasting["welcome"] = (self.on_position(position),)
        self._exchange.put_snapshot(sequence, vector, work)

    def _move(self, move: Move) -> Moved:
        """Have the ranks move. Without ranks the model is the base: the next ones begin there."""
        how = "take" if self._takes else move.how
        self._moving = move.version, self._number_of(move.base)
        try:
            answer = self._ordered(
                "move", move.version, how, self._moving[1], self._number_of(move.reference)
            )
        finally:
            self._moving = None
        if answer is None:
            return Moved(taken=True)
        self._takes = False
        return Moved(*answer)

    def _ordered(self, *directive: Any) -> list[Any] | None:
        """Have all ranks carry out an order; None where one was lost meanwhile, or none is here."""
        gang, self._answer = self._gang, None
        if gang is None or not gang.is_attached:
            return None
        gang.order = True
        self._tell(*directive)
        while gang.order and self._gang is gang and not self._is_over():
            if self._wants_base:
                self._give_base()
            self.turn()
        return self._answer

    def _answered(self, *answer: Any) -> None:
        assert self._gang is not None
        self._answer, self._gang.order = list(answer), False

    def _attach(self, manifest: Manifest) -> None:
        """A gang has a model: its weights are the run's first ones, or it gets those of the run."""
        own, self._scratch, self._manifest = self._scratch, None, None
        known = self._exchange.manifest
        self._takes = True
        if known is None:
            assert own is not None
            self._exchange.attach(manifest, own)
        elif known.fingerprint != manifest.fingerprint:
            difference = manifest.difference(known)
            self.fail(f"the ranks that came back have another model: {difference}", 2)
        else:
            self._exchange.restart(self._move)

    def _give_base(self) -> None:
        self._wants_base, self._is_reading = False, True
        if self._moving is not None:  # it is held already, and the order waits for this
            self._tell("base", *self._moving)
            return

        def use(base: Vector, version: int) -> None:
            self._tell("base", version, self._number_of(base))
            while self._is_reading and not self._is_over():
                self.turn()

        if not self._exchange.use_base(use):
            self._tell("base", NO_VERSION, 0)

    def _number_of(self, vector: Vector) -> int:
        """The number of a vector's slot, which the ranks get first if they do not have it."""
        slot = self.slots.number_of(vector)
        gang = self._gang
        # Ranks that have told no shape yet get all slots with the answer to that.
        if gang is not None and gang.is_attached and slot not in self._known_slots:
            self._tell_slots([slot])
        return slot

    def _tell_slots(self, slots: list[int]) -> None:
        self._known_slots.update(slots)
        self._tell("slots", slots, [self.slots.path(slot) for slot in slots])

    def _tell(self, name: str, *values: object) -> None:
        """Send the ranks a directive; what holds for good goes to later gangs too."""
        if name in {"welcome", "stop", "refuse", "position", "pace"}:
            self._lasting.pop(name, None)  # in the order of the last ones
            self._lasting[name] = values
        gang = self._gang
        if gang is not None:
            try:
                gang.link.send(name, *values)
            except OSError as error:  # it is gone, or has not read for long
                self._lost(gang.link, str(error))

    # --- connections ---

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connected, _ = listening.accept()
            if len(self._links) >= MOST_CONNECTIONS:
                connected.close()
                return
            link = Link(connected)
            self._links[link] = (-1, -1)
            self._selector.register(link, selectors.EVENT_READ, lambda: self._read(link))

    def _read(self, link: Link) -> None:
        if link not in self._links:
            return
        try:
            found = link.receive()
            assert found is not None
            name, *values = found
            if name == "hello":
                self._greeted(link, *values)
            elif name == "failed":
                self.fail(*values)
            elif self._gang is not None and link is self._gang.link:
                self._handlers[name](*values)
        except (EOFError, OSError) as error:
            self._lost(link, str(error))
        except (ManifestError, ValueError, KeyError, TypeError) as error:
            self._lost(link, f"it broke the protocol: {error}")

    def _greeted(self, link: Link, rank: int, world: int, generation: int) -> None:
        if not rank and self._gang is not None:
            self._lose("torchrun started its ranks again")
        self._links[link] = rank, generation
        if rank:
            return
        self._gang = _Gang(link, world, generation)
        self._note("ranks_here", world=world, generation=generation)
        for name, values in list(self._lasting.items()):
            self._tell(name, *values)

    def _lost(self, link: Link, reason: str) -> None:
        rank, generation = self._links.get(link, (-1, -1))
        self._close(link)
        if self._gang is not None and generation == self._gang.generation:
            self._lose(f"rank {rank} is gone ({reason or 'closed'})")

    def _close(self, link: Link) -> None:
        if self._links.pop(link, None) is not None:
            self._selector.unregister(link)
            link.close()

    # --- a gang ---

    def _make_slots(self, values: int) -> None:
        if self._values not in {0, values}:
            self.fail(f"the ranks that came back have {values:,} values, not {self._values:,}", 2)
            return
        self._values = values
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

    def _attached(self, tensors: list[Any], frozen: list[Any]) -> None:
        assert self._gang is not None
        self._gang.is_attached = True
        self._manifest = Manifest.from_wire(tensors, frozen)
        self._say(f"all {self._gang.world} ranks are here")

    def _pace_reached(self) -> None:
        self._exchange.reach_pace()

    def _base_wanted(self) -> None:
        self._wants_base = True

    def _base_read(self) -> None:
        self._wants_base = self._is_reading = False

    def _ended(self) -> None:
        self.all_ended = True
        self.meter.waits()
        self._note("ranks_ended")

    def _lose(self, reason: str) -> None:
        """The gang is gone: end what is left of it."""
        gang, self._gang = self._gang, None
        assert gang is not None
        self._gives_up_at = time.monotonic() + WAIT_S
        for link, (_, generation) in list(self._links.items()):
            if generation == gang.generation:
                self._close(link)
        self._base_read()
        gone = self.meter.lost()
        self._note("ranks_lost", reason=reason, tokens=gone)
        if self._scratch is not None:
            self.slots.retire(self._scratch)
        self._manifest, self._scratch, self._takes = None, None, True
        self._known_slots = set()
        if not self.all_ended and self.failure is None:
            self._say(
                f"{reason}: {gone:,} tokens since the last delta are lost; the weights are kept"
                f" here for {WAIT_S:g} s, until torchrun starts the ranks again"
            )

    def _note(self, kind: str, **facts: object) -> None:
        self._journal.note(kind, time.monotonic(), **facts)

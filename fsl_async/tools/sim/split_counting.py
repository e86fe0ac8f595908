"""Split learning replaced by counting.

The parts at the split server, their disk, and a client's training thread.

x_s (or each replica) is the list of what it was trained on, as a hash over its whole history; an
auxiliary model is a hash over its own. What travels is a vector of numbers that such a hash is
written into. So whatever would corrupt real weights (an upload trained twice, a gradient for
another batch, a model of another lineage, a checkpoint of two moments) gives a wrong number here.
`SplitDisk` survives a split server's process; everything else is lost with it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen, mutable

from fsl_async.learn.split.payload import Payload, Values
from fsl_async.roles.machine import Event
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.roles.split.methods import Method
from fsl_async.roles.split.methods.base import Position
from fsl_async.roles.sync.events import Attached, Snapshotted
from fsl_async.tools.sim.counting import MANIFEST, CountingLearner
from fsl_transport import Scheduler

BUFFER_SAMPLES = 64
SAMPLES = 16
"""Of a batch."""
SHAPE = (SAMPLES, 4)
"""Of what crosses the cut."""
STEPS = 8
"""Of a round."""
AUXILIARY_VALUES = 5
"""A version, and a hash."""
_DIGITS = 4
"""Hexadecimal digits in one value: float32 holds them exactly."""

StepKey = tuple[int, int, int]
"""Round, step and leg."""


def mixed(*parts: object) -> str:
    """A hash over texts: 16 hexadecimal digits."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


def written(content: str, size: int, *before: int) -> Values:
    """A vector of `size` values: the numbers `before`, the hash `content`, zeros."""
    found = np.zeros(size, np.float32)
    digits = (content[at : at + _DIGITS] for at in range(0, len(content), _DIGITS))
    numbers = [*before, *(int(each, 16) for each in digits)]
    found[: len(numbers)] = numbers
    return found


def read(values: Values, start: int = 0) -> str:
    """The hash that `written` has put behind `start` numbers."""
    numbers = values[start : start + 16 // _DIGITS]
    return "".join(f"{int(each):0{_DIGITS}x}" for each in numbers)


def crossing(content: str, labels: bytes = b"") -> Payload:
    """A payload that carries a hash."""
    return Payload(written(content, math.prod(SHAPE)), SHAPE, labels)


@frozen
class State:
    """The state of a split server, with hashes instead of tensors."""

    trained: frozenset[UploadKey] = frozenset()  # filled in by a checkpoint
    uploads: int = 0
    last: Mapping[str, UploadKey] = field(factory=dict)
    parts: Mapping[str, str] = field(factory=dict)  # client ("" for the common one) -> hash
    auxiliary: Mapping[str, tuple[int, str]] = field(factory=dict)  # client -> version and hash
    buffers: Mapping[str, int] = field(factory=dict)  # client -> samples


@mutable
class SplitDisk:
    """The durable state of a split server: its newest checkpoint, and its ledger."""

    state: State = field(factory=State)
    book: SplitProgress = field(factory=SplitProgress)
    number: int = 0
    ledger: list[tuple[UploadKey, str]] = field(factory=list)
    versions: dict[str, int] = field(factory=dict)  # of auxiliary models, as booked
    at_checkpoint: int = 0  # lines of the ledger that the newest checkpoint has

    @property
    def fates(self) -> dict[UploadKey, str]:
        """The last line about each key."""
        return dict(self.ledger)

    def append(self, key: str, outcome: str, reason: str) -> None:
        """Enter the outcome of an upload."""
        self.ledger.append((UploadKey.parse(key), outcome))

    def append_auxiliary(self, client: str, version: int) -> None:
        """Enter that this version is about to be made."""
        self.versions[client] = version


class CountingServerTraining:
    """The parts of a split server, as `fsl_async.learn.split.server_training` has them.

    order: gets every upload that is trained, over all processes.
    """

    def __init__(self, disk: SplitDisk, method: Method, order: list[UploadKey]) -> None:
        self.disk = disk
        self.method = method
        self.state = disk.state
        self.uploads: dict[UploadKey, int] = {}  # here, not trained: samples
        self.answers: dict[UploadKey, Payload] = {}
        self.open: dict[str, UploadKey] = {}
        self._order = order
        self._seen = set(self.state.trained)

    def recover(self) -> ev.SplitRecovered:
        """Return what a new process recovers."""
        after = self.disk.ledger[self.disk.at_checkpoint :]
        fates = dict(after)
        lost = tuple(key for key, outcome in fates.items() if outcome == "trained")
        return ev.SplitRecovered(self.disk.book, lost, dict(self.disk.versions))

    def _part(self, client: str) -> str:
        return client if self.method.replicas else ""

    def objection(
        self, shape: Sequence[int], lengths: Sequence[int], samples: int, label_bytes: int
    ) -> str | None:
        """Return why an announced upload is not received."""
        fits = tuple(shape) == SHAPE and not lengths and samples == SAMPLES
        return None if fits and label_bytes in {0, SAMPLES} else "not an upload of this model"

    def put(self, key: UploadKey, payload: Payload) -> None:
        """Take a decoded upload."""
        assert read(payload.values) == mixed("upload", key.text), "the upload that was offered"
        self.uploads[key] = payload.shape[0]

    def drop(self, key: UploadKey) -> None:
        """Forget an upload that is not trained."""
        self.uploads.pop(key, None)

    def drop_answer(self, key: UploadKey) -> None:
        """Forget an answer."""
        self.answers.pop(key, None)

    def answer(self, key: UploadKey) -> Payload | None:
        """The answer to an upload, while it is kept."""
        return self.answers.get(key)

    def forget(self, client: str) -> None:
        """Drop a client's open steps."""
        self.open.pop(client, None)

    def train(self, effect: split.TrainUpload) -> ev.UploadTrained:
        """Step the part, or open a step (first leg of a U-shape)."""
        key = effect.key
        samples = self.uploads.pop(key)
        if key.leg and self.open.pop(key.client, None) != key.first_leg:
            return ev.UploadTrained(key, 0.0, 0, problem="no open step")
        assert key not in self._seen, f"upload {key.text} is trained twice"
        before = self.state.last.get(key.client)
        assert before is None or before < key, f"upload {key.text} is trained out of order"
        self._seen.add(key)
        self._order.append(key)
        part = self._part(key.client)
        parts = {**self.state.parts, part: mixed(self.state.parts.get(part, "x_s"), key.text)}
        buffers = dict(self.state.buffers)
        if self.method.aligned:
            held = buffers.get(key.client, 0) + samples
            buffers[key.client] = min(BUFFER_SAMPLES, held)
        self.state = evolve(
            self.state,
            uploads=self.state.uploads + 1,
            last={**self.state.last, key.client: key},
            parts=parts,
            buffers=buffers,
        )
        if self.method.legs > 1 and not key.leg:
            self.open[key.client] = key
        if effect.wants_answer:
            self.answers[key] = crossing(mixed("gradient", key.text))
        return ev.UploadTrained(key, 1.0, self.state.uploads, answer=effect.wants_answer)

    def align(self, effect: split.Align) -> ev.Aligned:
        """The client's next auxiliary model, made from the one before and the part as it is."""
        version, content = self.state.auxiliary.get(effect.client, (-1, mixed("x_a")))
        assert effect.version > version, "versions of an auxiliary model grow"
        part = self.state.parts.get(self._part(effect.client), "x_s")
        made = mixed(content, part, effect.version)
        auxiliary = {**self.state.auxiliary, effect.client: (effect.version, made)}
        self.state = evolve(self.state, auxiliary=auxiliary)
        return ev.Aligned(effect.client, effect.version)

    def auxiliary(self, client: str) -> Values:
        """The auxiliary model that is kept for a client."""
        version, content = self.state.auxiliary.get(client, (-1, mixed("x_a")))
        return written(content, AUXILIARY_VALUES, version)

    def average(self, effect: split.AverageReplicas) -> ev.ReplicasAveraged:
        """All replicas become the average of some."""
        parts = self.state.parts
        summands = [f"{name}:{n}:{parts.get(name, 'x_s')}" for name, n in effect.samples.items()]
        made = mixed("average", *sorted(summands))
        names = {*parts, *effect.samples, ""}
        self.state = evolve(self.state, parts=dict.fromkeys(names, made))
        return ev.ReplicasAveraged(effect.round)

    def copy(self, effect: split.Checkpoint) -> Callable[[], None]:
        """Copy the state in order with the training; the job that is returned writes it."""
        state = evolve(self.state, trained=frozenset(self._seen))
        book, lines = effect.book, len(self.disk.ledger)
        assert book.uploads == state.uploads == len(state.trained), (
            "book and tensors are of one moment"
        )
        for name, client in book.clients.items():
            assert client.last == state.last.get(name), "the book has what was trained"
            kept = state.auxiliary.get(name, (-1, ""))[0]
            assert client.auxiliary == kept, "the book has the auxiliary model that is kept"

        def write() -> None:
            disk = self.disk
            disk.state, disk.book, disk.number = state, book, effect.number
            disk.at_checkpoint = lines

        return write


@mutable
class Step:
    """A local step whose upload is out."""

    number: int
    leg: int = 0


class RoundLearner(CountingLearner):
    """A client's training thread.

    It trains rounds of `STEPS` batches when called, and uploads by the method.

    Towards the split server it is `fsl_async.learn.split.remote.SplitTraining`. name, incarnation:
    of the client.
    """

    auxiliary_values = AUXILIARY_VALUES

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        on_split: Callable[[Event], None],
        method: Method,
        *,
        name: str,
        incarnation: int,
        step_s: float,
        tokens_per_step: int,
        initial: int,
    ) -> None:
        super().__init__(
            clock, on_event, step_s=step_s, tokens_per_step=tokens_per_step, initial=initial
        )
        self.method = method
        self.kept: set[StepKey] = set()  # uploads that are not dropped
        self.auxiliary: tuple[int, str] = (-1, mixed("x_a"))
        self.applied: list[UploadKey] = []
        self.given_up = 0
        self.installed = 0
        self.waited_s = 0.0  # in steps, for slots and answers
        self.rounds: list[int] = []
        self._name, self._incarnation = name, incarnation
        self._on_split = on_split
        self._tokens = 0
        self._sent = 0
        self._slots = method.in_flight
        self._asked: tuple[int, int] | None = None  # sequence and round
        self._step = 0
        self._counted = 0  # steps of this round before, when it is trained again
        self._out: dict[tuple[int, int], Step] = {}  # steps that wait for an answer
        self._wants_alignment = False
        self._blocked_at: float | None = None
        self._going: Callable[[], None] | None = None  # what to do when what it waits for is here
        self._ended_round = False

    def attach(self) -> None:
        """The training function has built its model."""
        self.manifest = MANIFEST
        self._on_event(Attached(MANIFEST.fingerprint, MANIFEST.values))

    @property
    def trained_tokens(self) -> int:
        """Tokens of complete rounds."""
        return self._tokens

    @property
    def sent_tokens(self) -> int:
        """Tokens that are in a snapshot."""
        return self._sent

    def _at_next_step(self, action: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.time(), action)

    def begin_round(self, sequence: int, number: int) -> None:
        """Train a round, then copy the weights and wait."""
        assert self._asked is None, "one round at a time"
        assert self.model.version == number, "a round is trained from its version"
        again = bool(self.rounds) and self.rounds[-1] == number
        self._counted = self._counted + STEPS if again else 0
        self._asked = (sequence, number)
        self._step = 0
        self._after_step(self._send)

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        tokens, self._sent = self._tokens - self._sent, self._tokens
        self._deltas[sequence] = (self.model, tokens)
        steps = tokens // self._tokens_per_step
        self._on_event(Snapshotted(sequence, self.model.version, tokens, steps))

    def resume(self) -> None:
        """The thread goes on to wait for its next round."""

    # --- a round ---

    def _after_step(self, action: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.time() + self._step_s, self._unless_over, action)

    def _unless_over(self, action: Callable[[], None]) -> None:
        if not self._over:
            action()

    def _wait(self, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        """Go on as soon as `ready` is true."""

        def look() -> None:
            if not ready():
                self._going = look
                if self._blocked_at is None:
                    self._blocked_at = self._clock.time()
                return
            if self._blocked_at is not None:
                self.waited_s += self._clock.time() - self._blocked_at
            self._going = self._blocked_at = None
            then()

        self._unless_over(look)

    def _look(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            going()

    def _send(self) -> None:
        """The forward pass of a step is done."""
        if self.method.uploads_at(self._step):
            self._wait(lambda: self._slots > 0, self._upload)
        else:
            self._go_on()

    def _upload(self) -> None:
        assert self._asked is not None
        number, step = self._asked[1], self._counted + self._step
        self._slots -= 1
        due = self.method.aligns_at(Position(number, self._step))
        if self.method.gradients:
            self._out[(number, step)] = Step(step)
        self._wants_alignment = due and self.method.waits_for_alignment()
        self._on_split(self._ready(number, step, 0, due=due))
        self._wait(lambda: not self._wants_alignment, self._go_on)

    def _ready(self, number: int, step: int, leg: int, *, due: bool = False) -> ev.UploadReady:
        self.kept.add((number, step, leg))
        return ev.UploadReady(
            number,
            step,
            self.model.version,
            SAMPLES,
            SHAPE,
            len(self._labels(leg)),
            wants_gradient=self.method.gradients,
            alignment_due=due,
            leg=leg,
        )

    def _labels(self, leg: int) -> bytes:
        return b"" if leg or self.method.legs > 1 else bytes(SAMPLES)

    def payload(self, place: StepKey) -> Payload | None:
        """Return an upload's payload while it is kept."""
        if place not in self.kept:
            return None
        key = UploadKey(self._name, self._incarnation, *place)
        return crossing(mixed("upload", key.text), self._labels(key.leg))

    def drop(self, place: StepKey) -> None:
        """Forget an upload."""
        self.kept.discard(place)

    def _go_on(self) -> None:
        self._step += 1
        if self._step < STEPS:
            self._after_step(self._send)
        else:
            self._wait(lambda: not self._out, self._end_round)

    def _end_round(self) -> None:
        assert self._asked is not None
        if self.method.has_server:
            self._on_split(ev.RoundEnded(self._asked[1], STEPS * SAMPLES))
        else:
            self.settle(self._asked[1])

    def settle(self, number: int) -> None:
        """On to the parameter server."""
        if self._over:
            return
        assert self._asked is not None, "a round is settled once"
        assert self._asked[1] == number, "the round that is trained is settled"
        sequence, self._asked = self._asked[0], None
        self._tokens += STEPS * self._tokens_per_step
        self.rounds.append(number)
        self._snapshot(sequence, hold=True)

    # --- from the split server ---

    def report_loss(self, loss: float) -> None:
        """The split server's loss on an upload; nothing depends on it."""

    def hand(self, key: UploadKey, values: Values, loss: float) -> None:
        """The gradient, or the features, of an upload."""
        assert read(values) == mixed("gradient", key.text), "the gradient of this very upload"
        assert key not in self.applied, "a gradient is applied once"
        step = self._out.get((key.round, key.step))
        assert step is not None, "a step waits for it"
        assert step.leg == key.leg, "legs come in order"
        self.applied.append(key)
        if key.leg + 1 < self.method.legs:
            step.leg = key.leg + 1
            self._slots -= 1
            self._on_split(self._ready(key.round, key.step, step.leg))
            return
        del self._out[(key.round, key.step)]
        self._look()

    def give_up(self, key: UploadKey) -> None:
        """Go on without an answer."""
        self.given_up += 1
        self._out.pop((key.round, key.step), None)
        self._look()

    def free_slot(self) -> None:
        """Allow one more upload."""
        self._slots += 1
        assert self._slots <= self.method.in_flight, "slots are not made from nothing"
        self._look()

    def install(self, vector: Values) -> None:
        """Install an auxiliary model."""
        self.auxiliary = (int(vector[0]), read(vector, 1))
        self.installed += 1
        self._wants_alignment = False
        self._look()

    def keep(self) -> None:
        """Keep the present auxiliary model."""
        self._wants_alignment = False
        self._look()

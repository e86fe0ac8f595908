"""Split learning of a few real values on the virtual clock, every one of them checked.

The method, the parts of the model, their optimizers, the alignment, the split server's folder and a
client's training are those of production (`fsl_async.learn.split`). Here are a model of a few
values, the steps of a training thread on the virtual clock, and what a split server must hold.

Each part subtracts its weights w from its input, and the loss is half the square of the result,
summed over values, a mean over samples. So an upload z moves a split server's part by a known
amount (U-shape: with the gradients g of its features):

    m <- MOMENTUM m + (w - mean z)      w <- w - RATE m
    m <- MOMENTUM m - sum g
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, field, frozen, mutable
from torch import Tensor, nn

from fsl_async.learn.client.meter import Meter
from fsl_async.learn.models.cuts import CutModel
from fsl_async.learn.split.alignment import AlignSettings
from fsl_async.learn.split.build import client_part, split_server
from fsl_async.learn.split.model_parts import ClientPartOptions, ServerPart
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.payload import Payload, Values
from fsl_async.learn.split.remote import SplitTraining, StepKey, TrainingOptions
from fsl_async.learn.split.server import ServerSettings
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import ServerTraining, UploadShape
from fsl_async.roles.machine import Event
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.roles.split.methods import Method
from fsl_async.roles.split.methods.base import Crossing, FeatureGradient
from fsl_async.roles.sync.events import Attached, Snapshotted
from fsl_async.store.files import Files
from fsl_async.tools.sim.counting import MANIFEST, CountingLearner
from fsl_transport import Scheduler

VALUES = 3
"""Of each part, and of a sample at the cut."""
SAMPLES = 4
"""Of a batch."""
BUFFER_SAMPLES = 16
STEPS = 8
"""Of a round."""
RATE, MOMENTUM = 0.25, 0.5
TOLERANCE = 1e-4
SPLIT_DIR = Path("/split")
START = np.array([0.25, -0.5, 1.0], np.float32)
"""Of an auxiliary model, and of the split server's part."""
_SGD = OptimizerSpec("sgd", RATE, momentum=MOMENTUM)
_CLIENT_SGD = OptimizerSpec("sgd", RATE)


class Shift(nn.Module):
    """Subtracts its weights, float32 (VALUES,), from each sample."""

    def __init__(self, start: Values) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))

    def forward(self, values: Tensor) -> Tensor:
        """Return values - weight, shape (samples, VALUES)."""
        return values - self.weight


def half_square(outputs: Tensor, _: Tensor) -> Tensor:
    """Return half the squared norm of each sample, averaged."""
    return outputs.square().sum(1).mean() / 2


def model_of(method: Method) -> tuple[CutModel, nn.Module]:
    """Return a model for a method, and the auxiliary model that every client starts with."""
    server = Shift(START) if method.has_server else None
    tail = Shift(-START) if method.legs > 1 else None
    return CutModel(Shift(0 * START), server, tail), Shift(START)


# --- the split server -----------------------------------------------------------------------------


@frozen
class Held:
    """Weights and momentum of a split server's part, float32 (VALUES,)."""

    weights: Values
    momentum: Values = field(factory=lambda: np.zeros(VALUES, np.float32))


@frozen
class Moment:
    """What a checkpoint must hold. trained: keys, of `SplitLineage.trained`."""

    book: SplitProgress = field(factory=SplitProgress)
    trained: int = 0
    parts: Mapping[str, Held] = field(factory=dict)
    auxiliary: Mapping[str, tuple[int, bytes]] = field(factory=dict)


@mutable
class SplitLineage:
    """What the newest split server of a run must hold, made a second time over all processes."""

    trained: list[UploadKey] = field(factory=list)
    """In order; what was lost with a process is not in it."""
    parts: dict[str, Held] = field(factory=lambda: {"": Held(START)})
    """By client; "" is the common part."""
    auxiliary: dict[str, tuple[int, bytes]] = field(factory=dict)
    """Client -> version and weights of its aligned model."""
    moments: dict[int, Moment] = field(factory=lambda: {0: Moment(parts={"": Held(START)})})
    """Of checkpoints, by number."""
    sealed: int = 0
    """Number of the newest checkpoint that is durable."""
    fates: dict[UploadKey, str] = field(factory=dict)
    """The last line of the ledger about each upload."""
    order: list[UploadKey] = field(factory=list)
    """All trainings, of all processes."""
    sent: dict[UploadKey, bytes] = field(factory=dict)
    """Values of uploads as clients computed them."""
    answers: dict[UploadKey, list[bytes]] = field(factory=dict)
    """Answers that split servers computed; of an upload that was lost, more than one."""

    def recovered(self, number: int, found: ev.SplitRecovered) -> None:
        """Go back to checkpoint `number`, which a new process has loaded."""
        assert number >= self.sealed, f"checkpoint {self.sealed} is lost, {number} is loaded"
        moment = self.moments[number]
        assert found.book == moment.book, "a checkpoint holds the progress of its moment"
        lost = self.trained[moment.trained :]
        assert set(found.lost) <= set(lost), "an upload of a checkpoint counts as lost"
        recorded = [key for key in lost if self.fates.get(key) == "trained"]
        assert set(recorded) <= set(found.lost), "a lost upload is not reported"
        del self.trained[moment.trained :]
        self.parts, self.auxiliary = dict(moment.parts), dict(moment.auxiliary)
        self.moments = {number: moment}
        self.sealed = number

    def part(self, name: str) -> Held:
        """A part; a new replica is a copy of the common part."""
        return self.parts.setdefault(name, Held(self.parts[""].weights))


class CheckedDisk(ServerDisk):
    """The split server's folder, whose lines and checkpoints the lineage follows."""

    def __init__(self, files: Files, lineage: SplitLineage) -> None:
        super().__init__(SPLIT_DIR, files)
        self.lineage = lineage

    def append(self, key: str, outcome: str, reason: str) -> None:
        """See `ServerDisk.append`."""
        super().append(key, outcome, reason)
        self.lineage.fates[UploadKey.parse(key)] = outcome


class CheckedTraining(ServerTraining):
    """The split server's training; raises AssertionError where a value is not as it must be."""

    def __init__(self, method: Method, files: Files, lineage: SplitLineage) -> None:
        model, auxiliary = model_of(method)
        align = AlignSettings(1, BUFFER_SAMPLES, BUFFER_SAMPLES, _CLIENT_SGD)
        settings = ServerSettings(_SGD, half_square, align=align, shape=(VALUES,), classes=2)
        server = split_server(method, model, settings, auxiliary)
        shape = UploadShape((VALUES,), 2, per_token=False)
        super().__init__(method, server, shape, CheckedDisk(files, lineage))
        self.lineage = lineage
        self._seen: set[UploadKey] = set()
        self._last: dict[str, UploadKey] = {}

    def recover(self) -> ev.SplitRecovered:
        """See `ServerTraining.recover`."""
        found = super().recover()
        self.lineage.recovered(max(self.disk.numbers(), default=0), found)
        for name in self.lineage.parts:
            self._check_held(name)
        for client, (_, content) in self.lineage.auxiliary.items():
            assert self._auxiliary(client) == content, "an auxiliary model is kept"
        self._seen = set(self.lineage.trained)
        self._last = {key.client: key for key in self.lineage.trained}
        return found

    def put(self, key: UploadKey, payload: Payload) -> None:
        """See `ServerTraining.put`."""
        assert payload.values.tobytes() == self.lineage.sent[key], "an upload arrives as computed"
        super().put(key, payload)

    def buffered(self, client: str) -> int:
        """Return the samples that are kept for the alignment of a client."""
        if not self.method.aligned or client not in self.server.clients:
            return 0
        return self.server.alignment(client).samples

    def train(self, effect: split.TrainUpload) -> ev.UploadTrained:
        """See `ServerTraining.train`."""
        key, crossing = effect.key, self.uploads[effect.key]
        name = key.client if self.method.replicas else ""
        held = self.lineage.part(name)
        done = super().train(effect)
        if done.problem:
            self._check_held(name)
            return done
        assert key not in self._seen, f"upload {key.text} is trained twice"
        before = self._last.get(key.client)
        assert before is None or before < key, f"upload {key.text} is trained out of order"
        self._seen.add(key)
        self._last[key.client] = key
        self.lineage.trained.append(key)
        self.lineage.order.append(key)
        if self.method.legs == 1 or key.leg:
            self._trained(name, held, crossing)
        self._check_held(name)
        if done.answer:
            answer = self.answers[key].values.tobytes()
            self.lineage.answers.setdefault(key, []).append(answer)
        return done

    def _trained(self, name: str, held: Held, crossing: Crossing) -> None:
        """Follow the one step that an upload is."""
        if isinstance(crossing, FeatureGradient):
            gradient = -crossing.values.numpy().sum(0)
        else:
            gradient = held.weights - crossing.smashed.values.numpy().mean(0)  # type: ignore[union-attr]
        momentum = MOMENTUM * held.momentum + gradient
        found, wanted = self._weights(name), held.weights - RATE * momentum
        assert np.allclose(found, wanted, TOLERANCE, TOLERANCE), "an upload is one step"
        self.lineage.parts[name] = Held(found, momentum)

    def _weights(self, name: str) -> Values:
        part: ServerPart = self.server.part(name) if name else self.server.common
        found: Values = part.model.weight.detach().numpy().copy()  # type: ignore[operator,union-attr]
        return found

    def _auxiliary(self, client: str) -> bytes:
        return self.server.alignment(client).export().tobytes()

    def _check_held(self, name: str) -> None:
        held = self.lineage.part(name)
        assert np.array_equal(self._weights(name), held.weights), "nothing else moves a part"

    def align(self, effect: split.Align) -> ev.Aligned:
        """See `ServerTraining.align`."""
        done = super().align(effect)
        if not done.problem:
            version, _ = self.lineage.auxiliary.get(effect.client, (-1, b""))
            assert effect.version > version, "versions of an auxiliary model grow"
            made = self._auxiliary(effect.client)
            self.lineage.auxiliary[effect.client] = effect.version, made
        return done

    def average(self, effect: split.AverageReplicas) -> ev.ReplicasAveraged:
        """See `ServerTraining.average`."""
        total = float(sum(effect.samples.values()))
        shares = {name: count / total for name, count in effect.samples.items()}
        wanted = sum(share * self.lineage.part(name).weights for name, share in shares.items())
        done = super().average(effect)
        found = self._weights("")
        assert np.allclose(found, wanted, TOLERANCE, TOLERANCE), "an average of replicas"
        for name, held in self.lineage.parts.items():
            self.lineage.parts[name] = evolve(held, weights=found)
            self._check_held(name)
        return done

    def copy(self, effect: split.Checkpoint) -> Callable[[], None]:
        """See `ServerTraining.copy`."""
        lineage, book = self.lineage, effect.book
        number = max(self.disk.numbers(), default=0) + 1
        seal = super().copy(effect)
        assert book.uploads == len(lineage.trained), "progress and tensors are of one moment"
        for name, client in book.clients.items():
            assert client.last == self._last.get(name), "the progress has what was trained"
            kept = lineage.auxiliary.get(name, (-1, b""))[0]
            assert client.auxiliary == kept, "the progress has the auxiliary model that is kept"
        parts, auxiliary = dict(lineage.parts), dict(lineage.auxiliary)
        lineage.moments[number] = Moment(book, len(lineage.trained), parts, auxiliary)

        def write() -> None:
            seal()
            lineage.sealed = number

        return write


# --- a client -------------------------------------------------------------------------------------


class _Waking(threading.Condition):
    """Calls `wake` where a condition would notify a thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def notify_all(self) -> None:
        """Call it."""
        self._wake()


class CheckedSplitTraining(SplitTraining):
    """A client's training with the split server, whose every value is checked.

    learner: its run and training thread.
    """

    def __init__(self, method: Method, learner: RoundLearner, lineage: SplitLineage) -> None:
        model, auxiliary = model_of(method)
        options = ClientPartOptions(
            _CLIENT_SGD,
            half_square,
            name=learner.name,
            in_flight=method.in_flight,
            auxiliary_optimizer=_CLIENT_SGD,
        )
        part = client_part(method, model, options, auxiliary)
        super().__init__(part, method, TrainingOptions(2), learner)
        self._changed = _Waking(learner.wake)
        self.lineage = lineage
        self.given_up = 0
        self.auxiliary = START.tobytes()
        """Content of the auxiliary model that it was given last."""
        self._applied: set[UploadKey] = set()
        self._learner = learner

    @property
    def kept(self) -> int:
        """Uploads that are not dropped."""
        return len(self._kept)

    def payload(self, key: StepKey) -> Payload | None:
        """See `SplitTraining.payload`."""
        found = super().payload(key)
        if found is not None:
            named = UploadKey(self._learner.name, self._learner.incarnation, *key)
            values = found.values.tobytes()
            assert self.lineage.sent.setdefault(named, values) == values, "an upload stays as it is"
        return found

    def hand(self, key: UploadKey, values: Values, loss: float) -> None:
        """See `SplitTraining.hand`."""
        assert values.tobytes() in self.lineage.answers[key], "the answer to this very upload"
        assert key not in self._applied, "an answer is applied once"
        self._applied.add(key)
        super().hand(key, values, loss)

    def give_up(self, key: UploadKey) -> None:
        """See `SplitTraining.give_up`."""
        self.given_up += 1
        super().give_up(key)

    def free_slot(self) -> None:
        """See `SplitTraining.free_slot`."""
        super().free_slot()
        assert self._slots <= self.method.in_flight, "slots are not made from nothing"

    def install(self, vector: Values) -> None:
        """See `SplitTraining.install`."""
        self.auxiliary = vector.tobytes()
        super().install(vector)


class RoundLearner(CountingLearner):
    """A client's training thread: rounds of `STEPS` batches when it is called.

    It is the `Run` of its `split` training. name, incarnation: of the client.
    """

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        on_split: Callable[[Event], None],
        method: Method,
        lineage: SplitLineage,
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
        self.name, self.incarnation = name, incarnation
        self.meter = Meter()
        self.split = CheckedSplitTraining(method, self, lineage)
        self._chance = random.Random(f"{name}/{incarnation}")  # noqa: S311 - not for secrets
        self._on_split = on_split
        self._tokens = 0
        self._sent = 0
        self._work: Generator[float | Callable[[], bool], None, None] | None = None
        self._ready: Callable[[], bool] | None = None

    # --- the run, for `split` ---

    @property
    def running(self) -> bool:
        """Whether training goes on."""
        return not self._over

    @property
    def version(self) -> int:
        """The version that is trained."""
        return self.model.version

    def post_split(self, event: Event) -> None:
        """Give the session with the split server an event, on the loop."""
        self._clock.call_at(self._clock.time(), self._on_split, event)

    # --- the exchange with the parameter server ---

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

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        tokens, self._sent = self._tokens - self._sent, self._tokens
        self._deltas[sequence] = (self.model, tokens)
        steps = tokens // self._tokens_per_step
        self._on_event(Snapshotted(sequence, self.model.version, tokens, steps))

    def resume(self) -> None:
        """The thread goes on to wait for its next round."""

    # --- a round ---

    def begin_round(self, sequence: int, number: int) -> None:
        """Train a round, then copy the weights and wait."""
        assert self._work is None, "one round at a time"
        assert self.model.version == number, "a round is trained from its version"
        self._work = self._round(sequence, number)
        self._go_on()

    def _round(
        self, sequence: int, number: int
    ) -> Generator[float | Callable[[], bool], None, None]:
        """Yield seconds of computation, and conditions to wait for."""
        rng = np.random.default_rng(self._chance.getrandbits(32))
        self.split.begin_round(number)
        for _ in range(STEPS):
            yield self._step_s
            inputs = torch.from_numpy(rng.standard_normal((SAMPLES, VALUES), np.float32))
            yield from self.split.batch_work(inputs, torch.zeros(SAMPLES, dtype=torch.int64))
        yield from self.split.end_work()
        self._work = None
        self._tokens += STEPS * self._tokens_per_step
        self._snapshot(sequence, hold=True)

    def _go_on(self) -> None:
        """Train until time has to pass or something has to come."""
        work = self._work
        while work is not None and self._work is work and not self._over:
            waits = next(work, None)
            if isinstance(waits, float):
                self._clock.call_at(self._clock.time() + waits, self._go_on)
                return
            if waits is not None and not waits():
                self._ready = waits
                return

    def wake(self) -> None:
        """Look, on the loop, whether what training waits for is here."""
        self._clock.call_at(self._clock.time(), self._look)

    def _look(self) -> None:
        if self._ready is not None and self._ready():
            self._ready = None
            self._go_on()


__all__ = [
    "BUFFER_SAMPLES",
    "SPLIT_DIR",
    "STEPS",
    "CheckedDisk",
    "CheckedTraining",
    "RoundLearner",
    "SplitLineage",
]

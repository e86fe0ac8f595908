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

import functools
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from attrs import evolve, field, frozen, mutable
from torch import Tensor, nn

from fsl_async.files.files import Files
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.meter import Meter
from fsl_async.learn.client.ports import Move, Moved, RoundOrder, SnapshotOrder, Vector
from fsl_async.learn.models.cuts import CutModel
from fsl_async.learn.split.build import client_part, split_server
from fsl_async.learn.split.model_parts import (
    AlignSettings,
    ClientPart,
    ClientPartOptions,
    OptimizerSpec,
    ServerPart,
    ServerPartOptions,
)
from fsl_async.learn.split.payload import Payload, Values
from fsl_async.learn.split.remote import SplitTraining, StepKey
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import ServerTraining, UploadShape
from fsl_async.roles.machine import Event, TrainingEnded
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split.client import RETAIN
from fsl_async.roles.split.events import SplitProgress
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.methods import Method
from fsl_async.roles.split.methods.base import Activations, Crossing, FeatureGradient
from fsl_async.tools.sim.training import Launch, VirtualTraining
from fsl_async.tools.sim.training_thread import Changed, TrainingThread

VALUES = 3
"""Values of each part, and of a sample at the cut."""
SAMPLES = 4
"""Samples of a batch."""
BUFFER_SAMPLES = 16
STEPS = 8
"""Steps of a round."""
RATE, MOMENTUM = 0.25, 0.5
TOLERANCE = 1e-4
SPLIT_DIR = Path("/split")
START = np.array([0.25, -0.5, 1.0], np.float32)
"""First weights of an auxiliary model, and of the split server's part."""
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


def client_of(method: Method, name: str = "") -> ClientPart:
    """Return the part of a client."""
    model, auxiliary = model_of(method)
    options = ClientPartOptions(
        _CLIENT_SGD,
        half_square,
        name=name,
        in_flight=method.in_flight,
        auxiliary_optimizer=_CLIENT_SGD,
    )
    return client_part(method, model, options, auxiliary)


def exchanged(part: ClientPart, method: Method) -> ModelWeights:
    """Return the weights of a client's part that the parameter server averages."""
    parts = {name: part.part(name) for name in method.averaged}
    return ModelWeights(parts["client"] if len(parts) == 1 else nn.ModuleDict(parts))


def model_of(method: Method) -> tuple[CutModel, nn.Module]:
    """Return a model for a method, and the auxiliary model that every client starts with."""
    server = Shift(START) if method.has_server else None
    tail = Shift(-START) if method.legs > 1 else None
    return CutModel(Shift(0 * START), server, tail), Shift(START)


# --- the split server -----------------------------------------------------------------------------


@frozen
class PartState:
    """Weights and momentum of a split server's part, float32 (VALUES,)."""

    weights: Values
    momentum: Values = field(factory=lambda: np.zeros(VALUES, np.float32))


@frozen
class CheckpointState:
    """The state that a checkpoint must hold. trained: keys, of `SplitLineage.trained`."""

    progress: SplitProgress = field(factory=SplitProgress)
    trained: int = 0
    parts: Mapping[str, PartState] = field(factory=dict)
    auxiliary: Mapping[str, tuple[int, bytes]] = field(factory=dict)


@mutable
class SplitLineage:
    """The state of the newest split server, made a second time over all processes of a run."""

    trained: list[UploadKey] = field(factory=list)
    """In order; what was lost with a process is not in it."""
    parts: dict[str, PartState] = field(factory=lambda: {"": PartState(START)})
    """By client; "" is the common part."""
    auxiliary: dict[str, tuple[int, bytes]] = field(factory=dict)
    """Client -> version and weights of its aligned model."""
    checkpoints: dict[int, CheckpointState] = field(
        factory=lambda: {0: CheckpointState(parts={"": PartState(START)})}
    )
    """The states of checkpoints, by number."""
    sealed: int = 0
    """Number of the newest checkpoint that is durable."""
    order: list[UploadKey] = field(factory=list)
    """All trainings, of all processes."""
    sent: dict[UploadKey, bytes] = field(factory=dict)
    """Values of uploads as clients computed them."""
    answers: dict[UploadKey, list[bytes]] = field(factory=dict)
    """Answers that split servers computed; of an upload that was lost, more than one."""

    def recovered(self, number: int, found: ev.SplitRecovered) -> None:
        """Go back to checkpoint `number`, which a new process has loaded."""
        assert number >= self.sealed, f"checkpoint {self.sealed} is lost, {number} is loaded"
        state = self.checkpoints[number]
        assert found.progress == state.progress, "a checkpoint holds the progress of its moment"
        lost = set(self.trained[state.trained :])
        assert lost.issuperset(found.lost), "an upload of a checkpoint counts as lost"
        del self.trained[state.trained :]
        self.parts, self.auxiliary = dict(state.parts), dict(state.auxiliary)
        self.checkpoints = {number: state}
        self.sealed = number

    def part(self, name: str) -> PartState:
        """A part; a new replica is a copy of the common part."""
        return self.parts.setdefault(name, PartState(self.parts[""].weights))


class CheckedTraining(ServerTraining):
    """The split server's training; raises AssertionError where a value is not as it must be."""

    def __init__(
        self, method: Method, files: Files, lineage: SplitLineage, clock: Callable[[], float]
    ) -> None:
        model, auxiliary = model_of(method)
        align = AlignSettings(1, BUFFER_SAMPLES, BUFFER_SAMPLES, _CLIENT_SGD)
        settings = ServerPartOptions(_SGD, half_square, align=align, shape=(VALUES,), classes=2)
        server = split_server(method, model, settings, auxiliary)
        shape = UploadShape((VALUES,), 2, per_token=False)
        super().__init__(method, server, shape, ServerDisk(SPLIT_DIR, files, clock, clock))
        self.lineage = lineage
        self._last: dict[str, UploadKey] = {}

    def recover(self) -> ev.SplitRecovered:
        """See `ServerTraining.recover`."""
        found = super().recover()
        self.lineage.recovered(max(self.disk.checkpoints.numbers(), default=0), found)
        for name in self.lineage.parts:
            self._check_held(name)
        for client, (_, content) in self.lineage.auxiliary.items():
            assert self._auxiliary(client) == content, "an auxiliary model is kept"
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
        before = self._last.get(key.client)
        text = f"upload {key.text} is trained twice, or out of order"
        assert before is None or before < key, text
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

    def _trained(self, name: str, held: PartState, crossing: Crossing) -> None:
        """Follow the one step that an upload is."""
        if isinstance(crossing, FeatureGradient):
            gradient = -crossing.values.numpy().sum(0)
        else:
            assert isinstance(crossing, Activations), "it was an upload"
            gradient = held.weights - crossing.smashed.values.numpy().mean(0)
        momentum = MOMENTUM * held.momentum + gradient
        found, wanted = self._weights(name), held.weights - RATE * momentum
        assert np.allclose(found, wanted, TOLERANCE, TOLERANCE), "an upload is one step"
        self.lineage.parts[name] = PartState(found, momentum)

    def _weights(self, name: str) -> Values:
        part: ServerPart = self.server.part(name) if name else self.server.common
        found: Values = part.model.weight.detach().numpy().copy()  # type: ignore[operator]
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
        lineage, progress = self.lineage, effect.progress
        number = max(self.disk.checkpoints.numbers(), default=0) + 1
        seal = super().copy(effect)
        assert progress.uploads == len(lineage.trained), "progress and tensors are of one moment"
        for name, client in progress.clients.items():
            assert client.last == self._last.get(name), "the progress has what was trained"
            kept = lineage.auxiliary.get(name, (-1, b""))[0]
            assert client.auxiliary == kept, "the progress has the auxiliary model that is kept"
        lineage.checkpoints[number] = CheckpointState(
            progress, len(lineage.trained), dict(lineage.parts), dict(lineage.auxiliary)
        )

        def write() -> None:
            seal()
            lineage.sealed = number

        return write


# --- a client -------------------------------------------------------------------------------------


class CheckedSplitTraining(SplitTraining):
    """A client's training with the split server, whose every value is checked.

    run: its training thread.
    """

    def __init__(self, method: Method, run: RoundTraining, lineage: SplitLineage) -> None:
        super().__init__(client_of(method, run.name), method, run, 2)
        self.lineage = lineage
        self.auxiliary = START.tobytes()
        """Content of the auxiliary model that it was given last."""
        self._applied: set[StepKey] = set()
        self._gradients = np.zeros(VALUES, np.float32)
        self._owner = run.name, run.incarnation

    def payload(self, key: StepKey) -> Payload | None:
        """See `SplitTraining.payload`."""
        found = super().payload(key)
        if found is not None:
            named = UploadKey(*self._owner, *key)
            values = found.values.tobytes()
            assert self.lineage.sent.setdefault(named, values) == values, "an upload stays as it is"
        return found

    def settle_upload(
        self, key: StepKey, answer: tuple[Vector, float] | None, *, waits: bool
    ) -> None:
        """See `SplitTraining.settle_upload`."""
        if answer is not None:
            values, named = answer[0], UploadKey(*self._owner, *key)
            assert values.tobytes() in self.lineage.answers[named], "the answer to this very upload"
            assert key not in self._applied, "an answer is applied once"
            self._applied.add(key)
            if named.leg == self.method.legs - 1:
                self._gradients += values.reshape(-1, VALUES).sum(0)
        super().settle_upload(key, answer, waits=waits)
        assert self._slots <= self.method.in_flight, "slots are not made from nothing"
        bound = self.method.in_flight + RETAIN
        assert len(self._kept) <= bound, f"more than {bound} uploads are kept"

    def check_change(self, change: Vector) -> None:
        """Check what a round did to the weights: by split servers' gradients, that is known."""
        wanted, self._gradients = RATE * self._gradients, np.zeros(VALUES, np.float32)
        if self.method.gradients:
            found = change[:VALUES]
            assert np.allclose(found, wanted, TOLERANCE, TOLERANCE), "every gradient is applied"

    def install(self, vector: Vector | None) -> None:
        """See `SplitTraining.install`."""
        if vector is not None:
            self.auxiliary = vector.tobytes()
        super().install(vector)


class RoundTraining(VirtualTraining):
    """A client's training: rounds of `STEPS` batches when it is called, in a thread each.

    It is the `Run` of its `split` training.
    """

    def __init__(
        self,
        launch: Launch,
        on_split: Callable[[Event], None],
        method: Method,
        lineage: SplitLineage,
    ) -> None:
        self.name, self.incarnation, clock = launch.name, launch.incarnation, launch.clock
        self._waits = Changed(clock)
        self.changed, self.now = cast("threading.Condition", self._waits), clock.time
        self.meter = Meter()
        self.split = CheckedSplitTraining(method, self, lineage)
        self._weights = exchanged(self.split.part, method)
        values = np.empty(self._weights.manifest.values, np.float32)
        self._weights.copy_out(values)
        super().__init__(
            clock,
            launch.feed,
            step_s=launch.step_s(),
            initial=values,
            unit=1.0,
            manifest=self._weights.manifest,
        )
        self.version = -1
        self._on_split = on_split
        self._chance = random.Random(f"{self.name}/{self.incarnation}")  # noqa: S311 - not for secrets
        self._thread: TrainingThread | None = None
        self._rounds = 0
        self._change = np.zeros_like(values)
        self._later: list[Callable[[], None]] = []

    # --- the run, for `split` ---

    @property
    def running(self) -> bool:
        """Whether training goes on."""
        return not self._over

    def begin_batch(self) -> None:
        """See `learn.split.remote.Run`: a batch is computed when its step is over."""
        assert self._thread is not None, "it is in a round"
        self._thread.sleep(self._step_s)

    def post_split(self, event: Event) -> None:
        """Give the session with the split server an event, on the loop."""
        self._clock.call_at(self._clock.time(), self._on_split, event)

    # --- for the parameter server ---

    @property
    def steps(self) -> int:
        """Steps of complete rounds."""
        return self._rounds * STEPS

    def work(self, begin: int, end: int) -> Vector:
        """Return the change of the weights since the last snapshot."""
        return self._change

    def stop(self) -> None:
        """End training."""
        self._clock.call_at(self._clock.time(), self._end)

    def end(self) -> None:
        """See `Trainer`."""
        if self._thread is not None:
            self._thread.kill()

    def _end(self) -> None:
        self.end()
        super()._end()
        self._on_split(TrainingEnded(None))

    def _train(self) -> None:
        """Do nothing: a round copies its weights when it ends."""

    def _at_next_step(self, action: Callable[[], None]) -> None:
        """Do it between two rounds."""
        if self._thread is None:
            self._clock.call_at(self._clock.time(), action)
        else:
            self._later.append(action)

    def _move(self, move: Move) -> Moved:
        moved = super()._move(move)
        self._weights.copy_in(self.values)
        self.version = move.version
        return moved

    def _begin(self, order: SnapshotOrder | RoundOrder) -> None:
        assert isinstance(order, RoundOrder), "clients are called for rounds"
        assert self._thread is None, "one round at a time"
        assert self.version == order.number, "a round is trained from its version"
        self._thread = self._waits.thread = TrainingThread(
            self._clock,
            None,  # nothing here draws from the default random generators
            functools.partial(self._train_round, order.number),
            functools.partial(self._round_ended, order, self.values.copy()),
            self.name,
        )
        self._thread.start()

    def _train_round(self, number: int) -> None:
        """Train a round, in its thread."""
        rng = np.random.default_rng(self._chance.getrandbits(32))
        self.split.begin_round(number)
        for _ in range(STEPS):
            inputs = torch.from_numpy(rng.standard_normal((SAMPLES, VALUES), np.float32))
            self.split.train_batch(inputs, torch.zeros(SAMPLES, dtype=torch.int64))
        self.split.end_round()

    def _round_ended(self, order: RoundOrder, before: Vector, error: BaseException | None) -> None:
        """Give the exchange the result of a round, on the loop."""
        self._thread = None
        if error is not None:
            raise error
        self._weights.copy_out(self.values)
        self._change = self.values - before
        self.split.check_change(self._change)
        self._rounds += 1
        self._snapshot(order, hold=True)
        later, self._later = self._later, []
        for action in later:
            self._at_next_step(action)

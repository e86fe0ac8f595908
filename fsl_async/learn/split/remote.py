"""A client's training thread with the split server's part on another machine.

    training = open_training(fed, part, ...)        part: ClientPart, from build.client_part(...)
    for number in fed.rounds():
        for inputs, labels in batches(number):
            training.train_batch(inputs, labels)    forward to the cut, uploads, one update
        fed.end_round(samples=n)

`train_batch` drives the method's local step and puts what is to cross into a queue of `in_flight`
slots. It blocks only when the queue is full, and where the method needs an answer; with more than
one in flight the next batch's forward pass then runs before the gradient of the one before is
there. A step whose answer will not come is left out.

Three threads meet here: the training thread calls `train_batch` and `end_round`, the loop thread
hands answers in and never waits, a worker codes what `payload` keeps.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from fsl_async.config.site_policy import ACTIVATIONS, LABELS
from fsl_async.errors import NotAllowedError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.meter import Meter
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.model_parts import ClientPart, StepReport
from fsl_async.learn.split.payload import Payload, pack_labels, put_back, valid_rows
from fsl_async.learn.split.smashed import Smashed, payload_of
from fsl_async.roles.machine import Event
from fsl_async.roles.split.events import RoundEnded, UploadReady
from fsl_async.roles.split.messages import SmashedMeta, UploadKey
from fsl_async.roles.split.methods import Method
from fsl_async.roles.split.methods.base import (
    Activations,
    AuxiliaryWanted,
    CutGradient,
    FeatureGradient,
    Features,
    Position,
    Steps,
)

POLL_S = 0.2
"""Time between two looks of a wait whether the run has ended."""

StepKey = tuple[int, int, int]
"""See `UploadKey.position`."""


@attrs.define(eq=False)
class _Open:
    """A step that waits for an answer."""

    steps: Steps
    at: Position
    batch: Batch
    shape: tuple[int, ...] = ()
    leg: int = 0
    before: int = 0
    labels_at_home: bool = False

    @property
    def key(self) -> StepKey:
        return self.at.round, self.before + self.at.step, self.leg


class Run(Protocol):
    """The part of `fsl_async.learn.client.fed.Fed` that the training needs."""

    # ruff: noqa: D102 - the implementation has them
    meter: Meter
    changed: threading.Condition

    @property
    def running(self) -> bool: ...
    @property
    def version(self) -> int: ...
    def begin_batch(self) -> None: ...
    def post_split(self, event: Event) -> None: ...


class SplitTraining:
    """See the module.

    classes: labels are in 0 ... classes - 1. features: of a U-shape, the shape of one sample's
    features where it differs from that of the activations in more than the last size. labels_stay:
    raise NotAllowedError instead of sending labels, whatever the method asks for.
    `run.meter` gets the begin, end and network waits of each step, which detects one that hangs.
    """

    def __init__(
        self,
        part: ClientPart,
        method: Method,
        run: Run,
        classes: int,
        *,
        features: tuple[int, ...] = (),
        labels_stay: bool = False,
    ) -> None:
        self.part = part
        self.method = method
        self.installed = 0
        """Auxiliary models that came and were used."""
        self._classes, self._features, self._labels_stay = classes, features, labels_stay
        self._run = run
        self._round = -1
        self._step = 0
        self._counted = 0  # steps of this round before, when it is trained again: keys grow
        self._samples = 0
        self._open: deque[_Open] = deque()
        # Guarded by the condition: what both the training thread and the loop touch.
        self._changed = run.changed
        self._slots = method.in_flight
        self._kept: dict[StepKey, Payload] = {}
        self._answers: dict[StepKey, tuple[Vector, float] | None] = {}
        self._model: Vector | None = None
        self._aligning = False
        self._settled = -1

    # --- training thread ---

    def begin_round(self, number: int) -> None:
        """The next batch is the first of round `number`."""
        self._counted = self._counted + self._step if number == self._round else 0
        self._round, self._step, self._samples = number, 0, 0
        self.part.begin_round(number)
        self._run.meter.step_begins()

    def train_batch(
        self, inputs: Tensor, labels: Tensor, lengths: Tensor | None = None
    ) -> float | None:
        """Do one local step, and block where it waits.

        Returns the loss of the newest step that is done; None when none was. A batch of one sample
        (the last of a round may be one) is left out where batch norm cannot train on it.
        """
        self._run.begin_batch()
        try:
            return self._batch(inputs, labels, lengths)
        finally:
            self._run.meter.step_ended()
            # The caller's work until the next batch, such as reading data, belongs to that step.
            self._run.meter.step_begins()

    def _batch(self, inputs: Tensor, labels: Tensor, lengths: Tensor | None) -> float | None:
        self._load_model()
        found: float | None = None
        while len(self._open) >= self.method.in_flight:
            found = self._finish_oldest()
        batch = Batch(inputs, labels, lengths)
        at = Position(self._round, self._step)
        self._step += 1
        self._samples += inputs.shape[0]
        entry = _Open(self.method.local_step(self.part, batch, at), at, batch, before=self._counted)
        try:
            done = self._drive(entry, None)
        except ValueError:
            if inputs.shape[0] > 1:
                raise
            self._run.meter.left_out += 1
            self._samples -= 1
            return found
        if done is None:
            self._open.append(entry)
            if self.method.in_flight == 1:
                return self._finish_oldest()
        return found if done is None else done.loss

    def end_round(self) -> int:
        """Finish open steps, report the round, wait until it may go on; returns its samples."""
        self._run.meter.step_dropped()
        while self._open:
            self._finish_oldest()
        if self.method.has_server:
            self._run.post_split(RoundEnded(self._round, self._samples))
            self._wait(lambda: self._settled >= self._round)
        return self._samples

    def _drive(self, entry: _Open, answer: Any) -> StepReport | None:
        """Run a step until it ends, or return None where it waits for an answer."""
        while True:
            try:
                crossing = entry.steps.send(answer)
            except StopIteration as end:
                report: StepReport = end.value
                self._run.meter.count(0, {"loss": report.loss})
                return report
            answer = None
            match crossing:
                case Activations(smashed=smashed, wants_answer=wants):
                    entry.shape = tuple(smashed.values.shape)
                    entry.labels_at_home = smashed.labels is None
                    self._upload(entry, smashed, wants=wants)
                    if wants:
                        return None
                case FeatureGradient(values=values):
                    entry.leg = 1
                    smashed = Smashed(values, None, entry.batch.lengths)
                    self._upload(entry, smashed, wants=True)
                    return None
                case AuxiliaryWanted() if self.method.waits_for_alignment():
                    self._wait(lambda: not self._aligning)
                    answer = self._take_model()
                case AuxiliaryWanted():
                    pass

    def _upload(self, entry: _Open, smashed: Smashed, *, wants: bool) -> None:
        payload = self._payload(smashed)
        key = entry.key
        due = self.method.aligns_at(entry.at)
        self._wait(lambda: self._slots > 0)
        with self._changed:
            self._slots -= 1
            self._kept[key] = payload
            self._aligning = self._aligning or due
        meta = SmashedMeta(
            UploadKey("", 0, *key),
            self._run.version,
            auxiliary=-1,
            shape=list(payload.shape),
            lengths=list(payload.lengths),
            samples=smashed.samples,
            label_bytes=len(payload.labels),
            wants_gradient=wants,
            alignment_due=due,
        )
        self._run.post_split(UploadReady(meta))

    def _payload(self, smashed: Smashed) -> Payload:
        labels, lengths = smashed.labels, smashed.lengths
        if labels is None:
            return payload_of(smashed.values, lengths)
        if self._labels_stay:
            raise NotAllowedError("this site's policy keeps labels here, and the method sends them")
        found = labels.cpu().numpy()
        if lengths is not None and found.ndim > 1:
            found = valid_rows(found, lengths.tolist())
        return payload_of(smashed.values, lengths, pack_labels(found, self._classes))

    def _finish_oldest(self) -> float | None:
        """Wait for the oldest open step's answers; its loss, or None where it was left out."""
        entry = self._open.popleft()
        while True:
            self._wait(lambda: entry.key in self._answers)
            with self._changed:
                answer = self._answers.pop(entry.key, None)
            crossing: CutGradient | Features | None = None
            with contextlib.suppress(ValueError):  # its size is not that of an answer to this step
                crossing = None if answer is None else self._shaped(entry, *answer)
            if crossing is None:
                entry.steps.close()
                self._run.meter.left_out += 1
                return None
            report = self._drive(entry, crossing)
            if report is not None:
                return report.loss

    def _shaped(self, entry: _Open, values: Vector, loss: float) -> CutGradient | Features:
        """Return received values in their shape. Raises ValueError for another size."""
        shape = entry.shape
        found: Any = values
        if entry.batch.lengths is not None:
            lengths = [int(each) for each in entry.batch.lengths]
            rows = values.reshape(sum(lengths), -1)
            found = put_back(rows, lengths, shape[1], 0.0)
        elif entry.labels_at_home and entry.leg == 0:
            # Where no shape is given, it may differ from that of the activations in the last size.
            found = values.reshape(shape[0], *(self._features or (*shape[1:-1], -1)))
        else:
            found = values.reshape(shape)
        tensor = torch.from_numpy(found)
        if entry.labels_at_home and entry.leg == 0:
            return Features(tensor)
        return CutGradient(tensor, None if entry.labels_at_home else loss, 0)

    def _load_model(self) -> None:
        vector = self._take_model()
        if vector is not None:
            self.part.load(vector, "auxiliary")
            self.installed += 1

    def _take_model(self) -> Vector | None:
        with self._changed:
            vector, self._model = self._model, None
        return vector

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if ready():
                return
            in_step = self._run.meter.step_waits()
            with self._run.meter.waiting():
                while not ready() and self._run.running:
                    self._changed.wait(POLL_S)
            if in_step:
                self._run.meter.step_begins()

    # --- worker thread ---

    @property
    def auxiliary_values(self) -> int:
        """Number of values that an installed model must have."""
        return ModelWeights(self.part.part("auxiliary")).layout.values

    def payload(self, key: StepKey) -> Payload | None:
        """Return an upload that is kept, or None."""
        with self._changed:
            return self._kept.get(key)

    # --- loop thread: never waits ---

    def drop(self, key: StepKey) -> None:
        """Forget an upload."""
        with self._changed:
            self._kept.pop(key, None)

    def settle_upload(
        self, key: StepKey, answer: tuple[Vector, float] | None, *, waits: bool
    ) -> None:
        """Free the slot of an upload.

        waits: its step waits for an answer: float32 values and the loss, or None where none comes.
        """
        with self._changed:
            self._slots += 1
            if waits:
                self._answers[key] = answer
            self._changed.notify_all()

    def install(self, vector: Vector | None) -> None:
        """Use this auxiliary model from the next step on; None: no newer one comes.

        A wait for one ends.
        """
        with self._changed:
            self._model = self._model if vector is None else vector
            self._aligning = False
            self._changed.notify_all()

    def settle_round(self, number: int) -> None:
        """The round may go to the parameter server."""
        with self._changed:
            self._settled = max(self._settled, number)
            self._changed.notify_all()


def open_training(
    fed: Fed,
    part: ClientPart,
    method: Method,
    *,
    classes: int,
    architecture: Mapping[str, str],
    features: tuple[int, ...] = (),
) -> SplitTraining:
    """Train `part` with the run's split server.

    Open the session, and wait until the weights are the run's.

    architecture: what must be the same at the split server, by name, in the order of comparison.
    classes, features: as in `SplitTraining`. Raises as `Fed.attach` does, and NotAllowedError where
    this site's policy keeps here what the method sends.
    """
    if method.has_server:
        sent = [ACTIVATIONS] if method.settings.labels_at_home else [ACTIVATIONS, LABELS]
        fed.policy.require(dict.fromkeys(sent, "the split server"), "this task's method")
    labels_stay = not fed.policy.lets(LABELS)
    training = SplitTraining(part, method, fed, classes, features=features, labels_stay=labels_stay)
    parts = {name: part.part(name) for name in method.averaged}
    whole = parts["client"] if len(parts) == 1 else nn.ModuleDict(parts)
    fed.attach_rounds(whole, training, architecture if method.has_server else None)
    return training

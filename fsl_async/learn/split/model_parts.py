"""The two parts of a cut model at work.

Each holds its modules and its optimizer, and computes one step at a time.

A client's step is `forward`, then one of `apply` (a cut gradient came back), `tail_step` and
`apply` (U-shape), or `auxiliary_step`. A split server's is `step`, or `forward` and `backward`
(U-shape). What a step has begun is held in a Pending: several may be open.

Gradients late. With `in_flight` > 1 a client may begin a batch before the gradient of the one
before has come. Weights then move between a batch's forward and its backward pass, so every forward
pass computes with copies of the weights (weight stashing, as in PipeDream, Narayanan et al., SOSP
2019): the gradient is exactly that of the weights it was asked with, and is applied late.

Optimizers are built from a few numbers, stepped with explicit gradients, and saved as named
tensors. All of them work value by value, with no norm over the whole model, so two parts with an
optimizer each move as the uncut model with one would. That is what makes SplitFed V1 equal to
FedAvg.

Random numbers. Forward passes draw dropout from (seed, part, owner, number of the step); see
`models.forward`. Backward passes draw nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsl_async.errors import one_line
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.models.forward import Batch, call, drawing, untouched
from fsl_async.learn.split import weights
from fsl_async.learn.split.smashed import (
    Loss,
    ModelPartMisused,
    Smashed,
    SmashedRefused,
    check_smashed,
    cross_entropy,
)

_CONSTANT = Schedule("constant", warmup_steps=0)


@attrs.frozen(slots=True)
class Rates:
    """A rate by round and step, the same at a client and at the split server.

    rounds: of the whole run, 0 if that is not planned: then only the warm-up changes the rate.
    decays_from: share of the rounds after which "wsd" falls.
    """

    schedule: Schedule = _CONSTANT
    rounds: int = 0
    decays_from: float = 1.0

    def factor(self, round_: int, steps: int) -> float:
        """Return the rate of a step of round `round_` as a share of its peak.

        steps: of this optimizer before.
        """
        progress = min(1.0, round_ / self.rounds) if self.rounds else None
        return self.schedule.factor(progress, self.decays_from, steps=steps, late=False)


@attrs.frozen(slots=True)
class OptimizerSpec:
    """Adam adds weight decay to the gradient (as published for FSL-SAGE); AdamW decays weights.

    SGD may have momentum.
    """

    name: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    rates: Rates = Rates()

    def build(self, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `weights`."""
        rate, decay = self.learning_rate, self.weight_decay
        if self.name == "sgd":
            return torch.optim.SGD(weights, lr=rate, momentum=self.momentum, weight_decay=decay)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind(weights, lr=rate, betas=self.betas, weight_decay=decay)


class Optimizer:
    """A torch optimizer over named weights; one without weights does nothing."""

    def __init__(self, spec: OptimizerSpec, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        self.round = 0
        """Round of the next step, which decides its rate."""
        self.steps = 0
        """Steps so far, for the warm-up."""
        self._spec = spec
        self._torch = spec.build(self.weights.values()) if self.weights else None

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Move the weights; one gradient per weight, in their order.

        None leaves a weight alone, as torch does.
        """
        if self._torch is None:
            return
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = gradient
        rate = self._spec.learning_rate * self._spec.rates.factor(self.round, self.steps)
        self.steps += 1
        for group in self._torch.param_groups:
            group["lr"] = rate
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return moments and counters by "weight/key", on the CPU; empty before the first step."""
        if self._torch is None:
            return {}
        return {
            f"{name}/{key}": value.detach().cpu()
            for name, weight in self.weights.items()
            for key, value in self._torch.state[weight].items()
            if isinstance(value, Tensor)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises ModelPartMisused for a weight that is not here or of another shape.
        """
        if self._torch is None:
            if state:
                raise ModelPartMisused("an optimizer without weights cannot take up a state")
            return
        self._torch.state.clear()
        for text, value in state.items():
            name, _, key = text.rpartition("/")
            weight = self.weights.get(name)
            if weight is None or (value.dim() and value.shape != weight.shape):
                raise ModelPartMisused(
                    f"the saved optimizer has {text!r}, which does not fit this part"
                )
            # counters stay on the CPU, where torch reads them without waiting for a GPU
            moved = value.clone() if not value.dim() else value.to(weight.device, copy=True)
            self._torch.state[weight][key] = moved


@attrs.frozen(slots=True)
class ClientPartOptions:
    """Options of the training of a client's part.

    `name` goes into the seeds of dropout; in_flight: steps that may be open at once.
    auxiliary_optimizer: of an auxiliary model that is trained here.
    """

    optimizer: OptimizerSpec = attrs.field(factory=OptimizerSpec)
    loss: Loss = cross_entropy
    seed: int = 0
    name: str = ""
    in_flight: int = 1
    auxiliary_optimizer: OptimizerSpec = attrs.field(factory=OptimizerSpec)


@attrs.frozen(slots=True)
class AlignSettings:
    """The defaults are those published for images: 100 passes over the newest 1000 samples."""

    passes: int = 100
    buffer_samples: int = 1000
    minibatch_samples: int = 1000
    optimizer: OptimizerSpec = attrs.field(factory=OptimizerSpec)


@attrs.frozen(slots=True)
class ServerPartOptions:
    """Options of the training of a split server's part.

    `shape` (activations of one sample, -1 for any size) and `classes` are checked in what clients
    send; None: anything. replicas: a part for each client.
    """

    optimizer: OptimizerSpec = attrs.field(factory=OptimizerSpec)
    loss: Loss = cross_entropy
    seed: int = 0
    shape: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    classes: int | None = attrs.field(default=None, kw_only=True)
    replicas: bool = attrs.field(default=False, kw_only=True)
    align: AlignSettings = attrs.field(factory=AlignSettings, kw_only=True)


@attrs.frozen(slots=True)
class StepReport:
    """Loss of one step (a mean over its batch), samples in it."""

    loss: float
    samples: int


@attrs.define(slots=True, eq=False)
class Pending:
    """A client's step between its forward pass and its update."""

    number: int
    batch: Batch
    values: Tensor
    """At the cut, with the graph that leads back to the weights."""
    used: dict[str, Tensor]
    """The weights, or the copies of them, that the forward pass computed with."""
    gradients: list[Tensor | None]
    loss: float = float("nan")

    @property
    def smashed(self) -> Smashed:
        """The activations as they may be sent: detached, with labels."""
        return Smashed(self.values.detach(), self.batch.labels, self.batch.lengths)

    @property
    def without_labels(self) -> Smashed:
        """The same with the labels left at home."""
        return Smashed(self.values.detach(), None, self.batch.lengths)


class _ClientModel(nn.Module):
    """Body and tail under one roof: one optimizer, one manifest, ties kept."""

    def __init__(self, body: nn.Module, tail: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        self.tail = tail

    def forward(self, part: str, values: Tensor, lengths: Tensor | None) -> Tensor:
        return call(self.get_submodule(part), values, lengths)


class ClientPart:
    """A client's part of the model, with its tail and its auxiliary model where it has them.

    `trains_auxiliary`: the auxiliary model has an optimizer of its own (CSE-FSL); else gradients
    only pass through it (FSL-SAGE). The modules stay where they are; batches are moved to their
    device.
    """

    def __init__(
        self,
        body: nn.Module,
        options: ClientPartOptions,
        *,
        tail: nn.Module | None = None,
        auxiliary: nn.Module | None = None,
        trains_auxiliary: bool = False,
    ) -> None:
        self.model = _ClientModel(body, tail).train()
        self.auxiliary = None if auxiliary is None else auxiliary.train()
        self.steps = 0
        """Forward passes begun: the counter behind dropout's random numbers."""
        self._options = options
        self._optimizer = Optimizer(options.optimizer, weights.parameter_tensors(self.model))
        found = weights.parameter_tensors(auxiliary) if auxiliary and trains_auxiliary else {}
        self._auxiliary_optimizer = Optimizer(options.auxiliary_optimizer, found)
        self._trains_auxiliary = trains_auxiliary
        self._open = 0

    def begin_round(self, number: int) -> None:
        """Take the learning rates of round `number`."""
        self._optimizer.round = self._auxiliary_optimizer.round = number

    @property
    def has_tail(self) -> bool:
        """Whether the last pieces, the loss and the labels are here too (U-shape)."""
        return self.model.tail is not None

    @property
    def device(self) -> torch.device:
        """Where the body is."""
        return weights.device_of(self.model)

    def forward(self, batch: Batch) -> Pending:
        """Begin a step. Raises ModelPartMisused when `in_flight` steps are open already."""
        if self._open >= self._options.in_flight:
            raise ModelPartMisused(
                f"{self._open} steps are open at this client, {self._options.in_flight} may be"
            )
        device = self.device
        batch = Batch(
            batch.inputs.to(device),
            batch.labels.to(device),
            None if batch.lengths is None else batch.lengths.to(device),
        )
        number, self.steps = self.steps, self.steps + 1
        used: dict[str, Tensor] = dict(self._optimizer.weights)
        if self._options.in_flight > 1:
            used = {name: weight.detach().clone().requires_grad_() for name, weight in used.items()}
        pending = Pending(number, batch, torch.empty(0), used, [None] * len(used))
        pending.values = self._run(pending, "body", batch.inputs)
        self._open += 1
        return pending

    def apply(self, pending: Pending, cut_gradient: Tensor) -> StepReport:
        """End a step with the gradient of the loss with respect to the activations at the cut."""
        if cut_gradient.shape != pending.values.shape:
            raise ModelPartMisused(
                f"a cut gradient of shape {tuple(cut_gradient.shape)}"
                f" for activations of {tuple(pending.values.shape)}"
            )
        self._collect(pending, pending.values, cut_gradient.to(pending.values))
        return self._finish(pending)

    def tail_step(self, pending: Pending, features: Tensor) -> Tensor:
        """U-shape: outputs and loss at home.

        Returns the gradient with respect to `features`; `apply` then ends the step.
        """
        if self.model.tail is None:
            raise ModelPartMisused("this client has no tail")
        given = features.detach().to(self.device).requires_grad_()
        loss = self._options.loss(self._run(pending, "tail", given), pending.batch.labels)
        pending.loss = loss.item()
        return self._collect(pending, loss, None, given)

    def auxiliary_step(self, pending: Pending) -> StepReport:
        """End a step through the auxiliary model.

        Its loss moves the body and, if it is trained here, itself.

        Raises ValueError, and the step is dropped, for one sample where there is batch norm.
        """
        model = self.auxiliary
        if model is None:
            raise ModelPartMisused("this client has no auxiliary model")
        try:
            return self._auxiliary_step(pending, model)
        except ValueError:  # batch norm and one sample
            self.drop(pending)
            raise

    def _auxiliary_step(self, pending: Pending, model: nn.Module) -> StepReport:
        labels, lengths = pending.batch.labels, pending.batch.lengths
        if not self._trains_auxiliary:
            with untouched(model):
                loss = self._options.loss(call(model, pending.values, lengths), labels)
            self._collect(pending, loss, None)
        else:
            with drawing(
                self.device, self._options.seed, "auxiliary", self._options.name, pending.number
            ):
                loss = self._options.loss(call(model, pending.values, lengths), labels)
            own = list(self._auxiliary_optimizer.weights.values())
            found = _gradients(loss, [*pending.used.values(), *own], None)
            self._auxiliary_optimizer.step(found[len(pending.used) :])
            pending.gradients = found[: len(pending.used)]
        pending.loss = loss.item()
        return self._finish(pending)

    def drop(self, pending: Pending) -> None:
        """Forget a step that will never end (its answer was lost). Weights stay as they are."""
        self._open -= 1
        pending.values = torch.empty(0)

    def export(self, part: str = "client") -> Vector:
        """The flat fp32 weights that are exchanged: of "client" (with the tail) or "auxiliary"."""
        return weights.export(self.part(part))

    def load(self, vector: Vector, part: str = "client") -> None:
        """Set the weights of a part; optimizers keep their moments (docs/adr/0022)."""
        weights.load(self.part(part), vector)

    def part(self, name: str) -> nn.Module:
        """The module called "client" or "auxiliary"."""
        found = {"client": self.model, "auxiliary": self.auxiliary}.get(name)
        if found is None:
            raise ModelPartMisused(f"this client has no part {name!r}")
        return found

    def _run(self, pending: Pending, part: str, values: Tensor) -> Tensor:
        with drawing(self.device, self._options.seed, part, self._options.name, pending.number):
            arguments = (part, values, pending.batch.lengths)
            if self._options.in_flight == 1:
                found: Tensor = self.model(*arguments)
            else:
                found = functional_call(self.model, pending.used, arguments, tie_weights=True)
        return found

    def _collect(
        self, pending: Pending, outputs: Tensor, gradient: Tensor | None, *more: Tensor
    ) -> Tensor:
        """Add gradients of `outputs` to the step's.

        Returns the one with respect to `more`, if that was given.
        """
        used = list(pending.used.values())
        found = _gradients(outputs, [*used, *more], gradient)
        pending.gradients = [
            new if old is None else old if new is None else old + new
            for old, new in zip(pending.gradients, found, strict=False)
        ]
        last = found[-1] if more else None
        return outputs.new_empty(0) if last is None else last

    def _finish(self, pending: Pending) -> StepReport:
        self._optimizer.step(pending.gradients)
        self.drop(pending)
        return StepReport(pending.loss, pending.batch.inputs.shape[0])


@attrs.frozen(slots=True, eq=False)
class ServerResult:
    """A split server's step.

    Loss, samples, the cut gradient if it was wanted, and how many updates x_s has had since the
    start.
    """

    loss: float
    samples: int
    gradient: Tensor | None
    updates: int


@attrs.frozen(slots=True, eq=False)
class ServerPending:
    """A split server's step in a U-shape, between features and their gradient."""

    smashed: Smashed
    given: Tensor
    features: Tensor
    updates: int
    number: int


class ServerPart:
    """The server's part of the model, one copy of it.

    `name` tells replicas apart in the seeds of dropout.
    """

    def __init__(
        self,
        body: nn.Module,
        options: ServerPartOptions,
        name: str = "",
    ) -> None:
        self.model = body.train()
        self.updates = 0
        """Optimizer steps so far: the version of x_s."""
        self.steps = 0
        """Forward passes begun: the counter behind dropout's random numbers."""
        self.last_loss = 0.0
        """Loss of the newest step whose loss was computed here."""
        self._options = options
        self._name = name
        self._optimizer = Optimizer(options.optimizer, weights.parameter_tensors(body))

    def begin_round(self, number: int) -> None:
        """Take the learning rate of round `number`, of which the next upload is."""
        self._optimizer.round = number

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return weights.device_of(self.model)

    @property
    def loss(self) -> Loss:
        """The loss its gradients are of."""
        return self._options.loss

    def received(self, smashed: Smashed) -> Smashed:
        """Check what a client sent, and move it to this part's device. Raises SmashedRefused."""
        check_smashed(smashed, self._options.shape, self._options.classes)
        return smashed.to(self.device)

    def step(self, smashed: Smashed, *, wants_gradient: bool) -> ServerResult:
        """Train on a batch; the cut gradient is that of the weights before this step.

        Raises SmashedRefused.
        """
        smashed = self.received(smashed)
        if smashed.labels is None:
            raise SmashedRefused("activations came without labels")
        given = smashed.values.detach().requires_grad_(wants_gradient)
        outputs = self._run(given, smashed.lengths, self._begin())
        loss = self._options.loss(outputs, smashed.labels)
        gradient = self._update(loss, None, given if wants_gradient else None)
        self.last_loss = loss.item()
        return ServerResult(self.last_loss, smashed.samples, gradient, self.updates)

    def forward(self, smashed: Smashed) -> ServerPending:
        """U-shape: compute the features that the client's tail is to see."""
        smashed = self.received(smashed)
        given = smashed.values.detach().requires_grad_()
        number = self._begin()
        features = self._run(given, smashed.lengths, number)
        return ServerPending(smashed, given, features, self.updates, number)

    def backward(self, pending: ServerPending, gradient: Tensor) -> Tensor:
        """U-shape: update with the gradient of the features; returns the cut gradient.

        Had x_s moved meanwhile (another client's step), the pass is computed again with the weights
        of now.
        """
        features = pending.features
        if gradient.shape != features.shape or not bool(torch.isfinite(gradient).all()):
            raise SmashedRefused("the gradient of the features has another shape or is not finite")
        if pending.updates != self.updates:
            features = self._run(pending.given, pending.smashed.lengths, pending.number)
        found = self._update(features, gradient.to(features), pending.given)
        return torch.zeros_like(pending.given) if found is None else found

    def gradient_at(self, smashed: Smashed) -> Tensor:
        """The gradient of the mean loss with respect to the activations, for alignment.

        Nothing moves, nothing is drawn.
        """
        given = smashed.values.detach().requires_grad_()
        if smashed.labels is None:
            raise ModelPartMisused("activations without labels cannot be aligned to")
        with untouched(self.model):
            loss = self._options.loss(call(self.model, given, smashed.lengths), smashed.labels)
        return torch.autograd.grad(loss, given)[0]

    def export(self) -> Vector:
        """The flat fp32 weights that are exchanged."""
        return weights.export(self.model)

    def load(self, vector: Vector) -> None:
        """Set the weights; the optimizer keeps its moments."""
        weights.load(self.model, vector)

    def state(self) -> dict[str, Tensor]:
        """Return everything as named tensors on the CPU, to be read before the next step."""
        found = weights.named_state(self.model, "server/")
        found |= weights.prefixed("optimizer/", self._optimizer.state())
        return found | {"steps": torch.tensor(self.steps), "updates": torch.tensor(self.updates)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        weights.load_named(self.model, "server/", state)
        self._optimizer.load(weights.under("optimizer/", state))
        self.steps, self.updates = int(state["steps"]), int(state["updates"])
        self._optimizer.steps = self.updates

    def _begin(self) -> int:
        number, self.steps = self.steps, self.steps + 1
        return number

    def _run(self, values: Tensor, lengths: Tensor | None, number: int) -> Tensor:
        try:
            with drawing(self.device, self._options.seed, "server", self._name, number):
                return call(self.model, values, lengths)
        except (ValueError, IndexError) as error:
            # Batch norm does not train on one sample; of those in front of it the statistics,
            # nothing else, have moved.
            raise SmashedRefused(
                f"the split server's part cannot take it: {one_line(str(error))}"
            ) from error

    def _update(
        self, outputs: Tensor, gradient: Tensor | None, given: Tensor | None
    ) -> Tensor | None:
        own = list(self._optimizer.weights.values())
        found = _gradients(outputs, own if given is None else [*own, given], gradient)
        self._optimizer.step(found[: len(own)])
        self.updates += 1
        return None if given is None else found[-1]


def _gradients(
    outputs: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None
) -> list[Tensor | None]:
    """Gradients of `outputs` (times `gradient`) with respect to `inputs`.

    None where there is no way to one.
    """
    if not inputs or not outputs.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(outputs, inputs, gradient, allow_unused=True))

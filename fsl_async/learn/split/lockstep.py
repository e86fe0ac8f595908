"""A whole run of a method in one process.

Clients come in their order, each with all its batches, one crossing at a time.

This is the reference for runs over a network: in their lockstep mode the same calls are made in the
same order, so weights agree to float tolerance.
"""

import copy
from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import nn

from fsl_async.learn.models.cuts import CutModel
from fsl_async.learn.models.forward import Batch, call, evaluating
from fsl_async.learn.split import weights
from fsl_async.learn.split.build import client_part, split_server
from fsl_async.learn.split.model_parts import ClientPart, ClientPartOptions, StepReport, total_loss
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.server import ServerSettings, SplitServer
from fsl_async.learn.split.smashed import IGNORED, Loss, ModelPartMisused, cross_entropy
from fsl_async.roles.split.methods import Method
from fsl_async.roles.split.methods.base import Position


@attrs.frozen(slots=True)
class Score:
    """Mean loss, share of right answers, and count of samples (of language models: tokens)."""

    loss: float
    accuracy: float
    count: int


class Lockstep:
    """m clients, a split server if the method has one, and the average at the end of each round."""

    def __init__(
        self,
        method: Method,
        clients: Mapping[str, ClientPart],
        server: SplitServer | None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        if method.has_server != (server is not None):
            raise ModelPartMisused(
                f"{method.name} {'needs a' if method.has_server else 'has no'} server"
            )
        self.method = method
        self.clients = dict(clients)
        self.server = server
        self.rounds = 0
        self._shares = shares or dict.fromkeys(clients, 1.0)
        self._turn: str | None = None  # the client that had x_c last, where they take turns

    def round(self, batches: Mapping[str, Iterable[Batch]]) -> dict[str, float]:
        """One round of the clients in `batches` (in the run's order); the others are away.

        Returns their mean losses.
        """
        present = [name for name in self.clients if name in batches]
        losses = {name: self._visit(name, batches[name]) for name in present}
        shares = {name: self._shares[name] for name in present}
        if present:
            for part in () if self.method.sequential else self.method.averaged:
                exported = [self.clients[name].export(part) for name in present]
                vector = weights.average(exported, list(shares.values()))
                for client in self.clients.values():
                    client.load(vector, part)
            if self.server is not None:
                self.method.end_round(self.server, shares)
        self.rounds += 1
        return losses

    def step(self, name: str, batch: Batch, at: Position) -> StepReport:
        """One local step of one client, with all its crossings."""
        self.clients[name].begin_round(at.round)
        if self.server is not None:
            self.server.part(name).begin_round(at.round)
        steps = self.method.local_step(self.clients[name], batch, at)
        answer = None
        while True:
            try:
                crossing = steps.send(answer)
            except StopIteration as end:
                report: StepReport = end.value
                return report
            if self.server is None:
                raise ModelPartMisused(f"{self.method.name} has no server")
            answer = self.method.serve(self.server, name, crossing)

    def model(self) -> CutModel:
        """The model to evaluate: x_c (of the last client where they take turns) and x_s."""
        name = self._turn if self.method.sequential and self._turn else next(iter(self.clients))
        front = self.clients[name].model
        server = None if self.server is None else self.server.common.model
        return CutModel(front.body, server, front.tail)

    def _visit(self, name: str, batches: Iterable[Batch]) -> float:
        client = self.clients[name]
        if self.method.sequential and self._turn not in (None, name):
            client.load(self.clients[str(self._turn)].export())
        reports = [
            self.step(name, batch, Position(self.rounds, number))
            for number, batch in enumerate(batches)
        ]
        self._turn = name
        return total_loss(reports)


def start(
    method: Method,
    model: CutModel,
    names: Iterable[str],
    optimizer: OptimizerSpec,
    *,
    auxiliary: nn.Module | None = None,
    auxiliary_optimizer: OptimizerSpec | None = None,
    loss: Loss = cross_entropy,
    seed: int = 0,
    server: ServerSettings | None = None,
    shares: Mapping[str, float] | None = None,
) -> Lockstep:
    """A run whose clients and server start from copies of the same parts and auxiliary model.

    auxiliary_optimizer: None for one as `optimizer`.
    """

    def own() -> nn.Module | None:
        return None if auxiliary is None else copy.deepcopy(auxiliary)

    options = ClientPartOptions(
        optimizer, loss, seed, auxiliary_optimizer=auxiliary_optimizer or optimizer
    )
    clients = {
        name: client_part(method, model.copies(), attrs.evolve(options, name=name), own())
        for name in names
    }
    settings = server or ServerSettings(optimizer, loss, seed)
    split = split_server(method, model.copies(), settings, own()) if method.has_server else None
    return Lockstep(method, clients, split, shares)


def evaluate(model: CutModel, batches: Iterable[Batch], loss: Loss = cross_entropy) -> Score:
    """Loss and accuracy in evaluation mode, each batch moved to the device of each part in turn."""
    parts = [part for part in (model.client, model.server, model.tail) if part is not None]
    summed, right, count = 0.0, 0, 0
    with torch.no_grad(), evaluating(*parts):
        for batch in batches:
            values, lengths = batch.inputs, batch.lengths
            for part in parts:
                device = weights.device_of(part)
                values = call(
                    part, values.to(device), None if lengths is None else lengths.to(device)
                )
            labels = batch.labels.to(values.device)
            counted = labels != IGNORED
            found = int(counted.sum())
            summed += loss(values, labels).item() * found
            right += int((values.argmax(-1)[counted] == labels[counted]).sum())
            count += found
    return Score(summed / max(count, 1), right / max(count, 1), count)

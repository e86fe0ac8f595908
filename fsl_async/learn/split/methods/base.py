"""What a method of split learning is: a client's local step, a server's answer, and what the end of a round does.

A local step is a generator. It yields what has to cross the cut and is sent what came back:

    steps = method.local_step(client, batch, at)
    answer = None
    while True:
        try: crossing = steps.send(answer)
        except StopIteration as end: report = end.value; break
        answer = ...                                    # carry `crossing` to method.serve(server, name, crossing) and back

So the same file serves a driver in one process, a client's training thread that waits for a network, and one that does not wait: where
a crossing `may_overlap`, None may be sent at once. Several generators of one client may be open (ClientPart's `in_flight`).

    crossing            from     answer                                     may overlap
    Activations         client   Features (U-shape), CutGradient, or None   if nothing is wanted back
    FeatureGradient     client   CutGradient                                no
    AuxiliaryWanted     client   vector of the auxiliary model, or None     yes; hand a later one to ClientPart.load(v, "auxiliary")

At the end of a round the client-side parts named in `averaged` are averaged at the federated server (`weights.average`, in the order of
the clients, shares renormalised over those present), and `end_round` does the split server's part.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal

import attrs
from torch import Tensor, nn

from fsl_async.errors import ConfigError
from fsl_async.learn.models.cuts import CutError, CutModel
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.model_parts import ClientPart, StepReport
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.server import ServerSettings, SplitServer
from fsl_async.learn.split.smashed import Loss, ModelPartMisused, Smashed, cross_entropy


@attrs.frozen(slots=True)
class MethodSettings:
    """Published values: every 5th batch is uploaded, auxiliary models are aligned every 10th round."""

    upload_every: int = 5
    align_every: int = 10

    def __attrs_post_init__(self) -> None:
        for name in ("upload_every", "align_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"split.{name} is {getattr(self, name)}: give at least 1")


@attrs.frozen(slots=True)
class Position:
    """Which round, and which local step of the client's in that round, both from 0."""

    round: int
    step: int


@attrs.frozen(slots=True, eq=False)
class Activations:
    """Up: smashed data, with labels unless the client has a tail."""

    smashed: Smashed
    wants_answer: bool

    @property
    def may_overlap(self) -> bool:
        """Whether the client may go on at once."""
        return not self.wants_answer


@attrs.frozen(slots=True, eq=False)
class FeatureGradient:
    """Up, U-shape: the gradient with respect to the features that the tail was given."""

    values: Tensor
    may_overlap: ClassVar[bool] = False


@attrs.frozen(slots=True)
class AuxiliaryWanted:
    """Up, empty: align this client's auxiliary model and send it."""

    may_overlap: ClassVar[bool] = True


@attrs.frozen(slots=True, eq=False)
class Features:
    """Down, U-shape: what the tail is to see."""

    values: Tensor


@attrs.frozen(slots=True, eq=False)
class CutGradient:
    """Down: the gradient with respect to the activations, the loss unless it was computed at home, the version of x_s."""

    values: Tensor
    loss: float | None
    updates: int


Crossing = Activations | FeatureGradient | AuxiliaryWanted
Steps = Generator[Crossing, Any, StepReport]


class Method(ABC):
    """A method's mathematics. It holds settings and no state: that is in the halves."""

    name: ClassVar[str]
    auxiliary: ClassVar[Literal["none", "trained", "aligned"]] = "none"
    """At the clients: none, trained there, or aligned by the server."""
    replicas: ClassVar[bool] = False
    """Whether the server keeps one x_s per client."""
    averaged: ClassVar[tuple[str, ...]] = ("client",)
    """Client-side parts averaged at the end of a round."""
    relay: ClassVar[bool] = False
    """Whether x_c is handed from client to client instead."""
    has_server: ClassVar[bool] = True

    def __init__(self, settings: MethodSettings) -> None:
        self.settings = settings

    @abstractmethod
    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch."""

    @abstractmethod
    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """Answer what `client` sent. Raises SmashedRefused, with nothing changed, for what makes no sense."""

    def end_round(self, server: SplitServer, shares: Mapping[str, float]) -> None:  # noqa: B027 - most do nothing
        """The split server's part of a round's end; `shares` are those of the clients that took part."""

    def check(self, halves: CutModel, auxiliary: nn.Module | None) -> None:
        """Raise ConfigError, in one line, when the method cannot run on such halves."""
        if self.has_server and halves.server is None:
            raise CutError(f"{self.name} needs a model that is cut")
        if not self.has_server and halves.server is not None:
            raise CutError(f"{self.name} trains the whole model at the clients: do not cut it")
        if self.auxiliary != "none":
            if halves.tail is not None:
                raise CutError(f"{self.name} needs labels at the server: it has no U-shape")
            if auxiliary is None:
                raise ConfigError(f"{self.name} needs an auxiliary model", "split.auxiliary")

    def client_half(
        self,
        halves: CutModel,
        optimizer: OptimizerSpec,
        *,
        auxiliary: nn.Module | None = None,
        loss: Loss = cross_entropy,
        seed: int = 0,
        name: str = "",
        in_flight: int = 1,
    ) -> ClientPart:
        """A client's half for this method, of the very modules given (`CutModel.copies` for a second client)."""
        self.check(halves, auxiliary)
        if not self.has_server:
            auxiliary = nn.Identity()  # the loss is that of the model's own outputs
        return ClientPart(
            halves.client,
            optimizer,
            tail=halves.tail,
            auxiliary=None if self.auxiliary == "none" and self.has_server else auxiliary,
            trains_auxiliary=self.auxiliary == "trained",
            loss=loss,
            seed=seed,
            name=name,
            in_flight=in_flight,
        )

    def server(
        self, halves: CutModel, settings: ServerSettings, auxiliary: nn.Module | None = None
    ) -> SplitServer:
        """The split server for this method, of the very modules given."""
        self.check(halves, auxiliary)
        if halves.server is None:
            raise CutError(f"{self.name} has no split server")
        aligned = auxiliary if self.auxiliary == "aligned" else None
        return SplitServer(halves.server, attrs.evolve(settings, replicas=self.replicas), aligned)


def gradient_step(client: ClientPart, batch: Batch) -> Steps:
    """One step with the server's own gradient, straight or U-shaped: what SL, SplitFed V1 and V2 have in common."""
    pending = client.forward(batch)
    try:
        if client.model.tail is None:
            gradient: CutGradient = yield Activations(pending.smashed, wants_answer=True)
            pending.loss = pending.loss if gradient.loss is None else gradient.loss
        else:
            features: Features = yield Activations(pending.without_labels, wants_answer=True)
            gradient = yield FeatureGradient(client.tail_step(pending, features.values))
    except GeneratorExit:  # the answer will not come
        client.drop(pending)
        raise
    return client.apply(pending, gradient.values)


def gradient_answer(server: SplitServer, client: str, crossing: Crossing) -> Features | CutGradient:
    """The server's side of `gradient_step`."""
    half = server.half(client)
    match crossing:
        case Activations(smashed=Smashed(labels=None) as smashed):
            pending = half.forward(smashed)
            server.pending.setdefault(client, deque()).append(pending)
            return Features(pending.features.detach())
        case Activations(smashed=smashed):
            result = half.step(smashed, wants_gradient=True)
            if result.gradient is None:
                raise ModelPartMisused("a step that wants a gradient gave none")
            return CutGradient(result.gradient, result.loss, result.updates)
        case FeatureGradient(values=values):
            return CutGradient(half.backward(server.open(client), values), None, half.updates)
    raise ModelPartMisused(f"nothing answers {type(crossing).__name__} in this method")

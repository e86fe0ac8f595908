"""A method of split learning: its decisions, and the order of its computations. Pure.

    method       trigger       uploads         answer    aligned     averaged   at the split server
    sl           sequential    every step      gradient              passed on  one x_s
    splitfed-v1  rounds/turns  every step      gradient              x_c        a replica per client
    splitfed-v2  rounds/turns  every step      gradient              x_c        one x_s
    cse-fsl      rounds/turns  every q-th step                       x_c, x_a   one x_s
    fsl-sage     rounds/turns  every q-th step           per client  x_c        x_s, x_a per client
    fedavg       rounds/turns  none                                  x          there is none

x_c is the client's part of the model, x_s the split server's, x_a an auxiliary model at the client.
The trigger `turns` is that of lockstep, where one client trains at a time and has one upload in
flight, so that a run is the same computation as in one process. In free mode all train at their own
pace; uploads overlap computation.

A local step is a generator. It yields what has to cross the cut and is sent what came back:

    steps = method.local_step(client, batch, at)
    answer = None
    while True:
        try: crossing = steps.send(answer)
        except StopIteration as end: report = end.value; break
        answer = ...    # carry `crossing` to method.serve(server, name, crossing), the result back

So one method serves a driver in one process, a client's training thread that waits for a network,
and one that does not wait. Several generators of one client may be open. Tensors pass through here
and are not looked into: `Client` and `Server` compute (`fsl_async.learn.split`).

    crossing         from    answer                                   may the client go on at once?
    Activations      client  Features (U-shape), CutGradient or None  if no answer is wanted
    FeatureGradient  client  CutGradient                              no
    AuxiliaryWanted  client  vector of the auxiliary model, or None   yes; it is loaded later

At the end of a round the client-side parts named in `averaged` are averaged, in the order of the
clients, with shares renormalized over those present, and `end_round` does the split server's part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal, Protocol

from attrs import frozen

Tensor = Any
"""A torch.Tensor. This package does not import torch."""

Auxiliary = Literal["none", "trained", "aligned"]
"""The auxiliary model at the clients: none, trained there and averaged, or aligned by the split
server, one per client.
"""

MAX_STALE_ROUNDS = 1
"""Uploads of an older round than this many behind the newest are declined."""


# --- what crosses the cut ---


@frozen
class Position:
    """Which round, and which local step of the client's in that round, both from 0."""

    round: int
    step: int


@frozen(eq=False)
class Activations:
    """Up: smashed data, with labels unless the client has a tail."""

    smashed: Any
    wants_answer: bool


@frozen(eq=False)
class FeatureGradient:
    """Up, U-shape: the gradient with respect to the features that the tail was given."""

    values: Tensor


@frozen
class AuxiliaryWanted:
    """Up, empty: align this client's auxiliary model and send it."""


@frozen(eq=False)
class Features:
    """Down, U-shape: the input of the tail."""

    values: Tensor


@frozen(eq=False)
class CutGradient:
    """Down: the gradient of the activations, and the loss unless it was computed at home.

    updates: of x_s before it.
    """

    values: Tensor
    loss: float | None
    updates: int


Crossing = Activations | FeatureGradient | AuxiliaryWanted
Steps = Generator[Crossing, Any, Any]
"""Ends in the client's report of the step (`fsl_async.learn.split.model_parts.StepReport`)."""


# --- what it reads, and what computes ---

# ruff: noqa: D102 - the implementations have them


class Settings(Protocol):
    """The part of `fsl_async.config.settings_training.SplitConfig` that methods read."""

    @property
    def method(self) -> str: ...
    @property
    def lockstep(self) -> bool: ...
    @property
    def labels_at_home(self) -> bool: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def upload_every(self) -> int: ...
    @property
    def align_every(self) -> int: ...


class Client(Protocol):
    """A client's part of the model (`fsl_async.learn.split.model_parts.ClientPart`)."""

    @property
    def has_tail(self) -> bool: ...
    def forward(self, batch: Any) -> Any: ...
    def apply(self, pending: Any, cut_gradient: Tensor) -> Any: ...
    def tail_step(self, pending: Any, features: Tensor) -> Tensor: ...
    def auxiliary_step(self, pending: Any) -> Any: ...
    def drop(self, pending: Any) -> None: ...
    def load(self, vector: Any, part: str = "client") -> None: ...


class Server(Protocol):
    """The split server's parts (`fsl_async.learn.split.server_training.SplitServer`)."""

    def part(self, client: str) -> Any: ...
    def alignment(self, client: str) -> Any: ...
    def forward(self, client: str, smashed: Any) -> Tensor: ...
    def backward(self, client: str, gradient: Tensor) -> Tensor: ...
    def average(self, shares: Mapping[str, float]) -> None: ...


# --- the method ---


class Method(ABC):
    """One method. It holds settings and no state: that is in the parts and in the machines."""

    name: ClassVar[str]
    """The value of `split.method`."""
    has_server: ClassVar[bool] = True
    """Whether the model is cut, and a split server holds a part of it."""
    sequential: ClassVar[bool] = False
    """Whether clients take turns in either mode, each from the weights of the one before."""
    gradients: ClassVar[bool] = False
    """Whether an upload is answered, and the client's step waits for that."""
    auxiliary: ClassVar[Auxiliary] = "none"
    replicas: ClassVar[bool] = False
    """Whether the split server keeps one x_s per client, and averages them after a round."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # --- decisions ---

    @property
    def averaged(self) -> tuple[str, ...]:
        """Parts of the client that its delta to the parameter server is made of, in order."""
        return ("client", "auxiliary") if self.auxiliary == "trained" else ("client",)

    @property
    def aligned(self) -> bool:
        """Whether the split server keeps and aligns an auxiliary model per client."""
        return self.auxiliary == "aligned"

    @property
    def trigger(self) -> str:
        """The way in which the parameter server runs rounds (`sync.trigger`)."""
        if self.sequential:
            return "sequential"
        return "turns" if self.settings.lockstep else "rounds"

    @property
    def in_flight(self) -> int:
        """Limit of the uploads of one client that are under way.

        The legs of a U-shape come in pairs, one pair at a time.
        """
        return (
            1 if self.settings.lockstep or self.settings.labels_at_home else self.settings.in_flight
        )

    @property
    def legs(self) -> int:
        """Uploads of a step."""
        return 2 if self.settings.labels_at_home and self.gradients else 1

    @property
    def waits_at_round_end(self) -> bool:
        """Whether a round ends at the client only when the split server has noted it.

        With replicas the others' average is made of what it has then; where clients take turns, the
        next one trains with x_s as this one leaves it.
        """
        return self.has_server and (self.settings.lockstep or self.replicas or self.sequential)

    @property
    def max_stale_rounds(self) -> int:
        """Limit of the rounds that an upload is behind.

        A replica has been replaced at the end of its round.
        """
        return 0 if self.replicas else MAX_STALE_ROUNDS

    @property
    def upload_every(self) -> int:
        """Steps from one upload to the next; 1 where steps wait for gradients."""
        return 1 if self.auxiliary == "none" else self.settings.upload_every

    def uploads_at(self, step: int) -> bool:
        """Whether the batch of this local step, from 0 in each round, is sent."""
        return self.has_server and step % self.upload_every == 0

    def aligns_in(self, round_: int) -> bool:
        """Whether the auxiliary model is aligned in this round, after its first upload."""
        every = self.settings.align_every
        return self.aligned and every > 0 and round_ % every == 0

    def aligns_at(self, at: Position) -> bool:
        """Whether this step asks for the aligned model."""
        return at.step == 0 and self.aligns_in(at.round)

    def waits_for_alignment(self) -> bool:
        """Whether the step waits for the aligned model; else the model is used once it is there."""
        return self.aligned and self.settings.lockstep

    # --- computations ---

    @abstractmethod
    def local_step(self, client: Client, batch: Any, at: Position) -> Steps:
        """Train on one batch."""

    def train_upload(
        self, server: Server, client: str, smashed: Any
    ) -> Features | CutGradient | None:
        """Train on what `client` sent of a batch; the answer, if there is one.

        Raises SmashedRefused, with nothing changed, for data that cannot be trained on.
        """
        raise NotImplementedError(f"{self.name} sends no uploads")

    def serve(self, server: Server, client: str, crossing: Crossing) -> Any:
        """Answer what crossed.

        Raises as `train_upload`, and ModelPartMisused for what the split server has no part for.
        """
        if isinstance(crossing, Activations):
            return self.train_upload(server, client, crossing.smashed)
        part = server.part(client)
        if isinstance(crossing, FeatureGradient):
            gradient = server.backward(client, crossing.values)
            return CutGradient(gradient, None, part.updates)
        alignment = server.alignment(client)
        alignment.align(part)
        return alignment.export()

    def end_round(self, server: Server, shares: Mapping[str, float]) -> None:
        """The split server's end of a round; shares: of the clients that took part."""
        if self.replicas:
            server.average(shares)


class GradientMethod(Method):
    """Every step waits for the split server's own gradient, as in SL, SplitFed V1 and V2."""

    gradients: ClassVar[bool] = True

    def local_step(self, client: Client, batch: Any, at: Position) -> Steps:
        """One step, straight or U-shaped."""
        pending = client.forward(batch)
        try:
            if not client.has_tail:
                gradient: CutGradient = yield Activations(pending.smashed, wants_answer=True)
                pending.loss = pending.loss if gradient.loss is None else gradient.loss
            else:
                features: Features = yield Activations(pending.without_labels, wants_answer=True)
                gradient = yield FeatureGradient(client.tail_step(pending, features.values))
        except GeneratorExit:  # the answer will not come
            client.drop(pending)
            raise
        return client.apply(pending, gradient.values)

    def train_upload(self, server: Server, client: str, smashed: Any) -> Features | CutGradient:
        """Step the part that this client trains with; features where its labels stay at home."""
        if smashed.labels is None:
            return Features(server.forward(client, smashed))
        result = server.part(client).step(smashed, wants_gradient=True)
        return CutGradient(result.gradient, result.loss, result.updates)

"""What a split server computes with: its parts of the model, and auxiliary models to align.

Per client it holds nothing but that, so its memory is bounded: a replica and its moments (SplitFed
V1), or an auxiliary model, its moments and a buffer of smashed samples (FSL-SAGE), and the steps of
a U-shape that are open.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor, nn

from fsl_async.learn.client.ports import Vector
from fsl_async.learn.split import weights
from fsl_async.learn.split.alignment import Alignment, AlignSettings
from fsl_async.learn.split.model_parts import ServerPart, ServerPartOptions, ServerPending
from fsl_async.learn.split.smashed import ModelPartMisused, Smashed, SmashedRefused


@attrs.frozen(slots=True)
class ServerSettings(ServerPartOptions):
    """How a split server's parts are made. replicas: one for each client."""

    replicas: bool = attrs.field(default=False, kw_only=True)
    align: AlignSettings = attrs.field(factory=AlignSettings, kw_only=True)


class SplitServer:
    """x_s and what is kept per client.

    One thread at a time: the order of calls is the order of updates.
    """

    def __init__(
        self, body: nn.Module, settings: ServerSettings, auxiliary: nn.Module | None = None
    ) -> None:
        self.settings = settings
        self.common = ServerPart(body, settings)
        """The one part, or with replicas their last average: what is evaluated, and what a new
        client's replica starts as."""
        self.pending: dict[str, deque[ServerPending]] = {}
        """U-shape: steps that wait for the gradient of their features, oldest first."""
        self._auxiliary = auxiliary
        self._replicas: dict[str, ServerPart] = {}
        self._alignments: dict[str, Alignment] = {}

    def part(self, client: str) -> ServerPart:
        """The part that trains on this client's activations."""
        if not self.settings.replicas:
            return self.common
        if client not in self._replicas:
            body = copy.deepcopy(self.common.model)
            self._replicas[client] = ServerPart(body, self.settings, client)
        return self._replicas[client]

    def alignment(self, client: str) -> Alignment:
        """What is kept for this client's auxiliary model; at first a copy of the common start."""
        if client not in self._alignments:
            if self._auxiliary is None:
                raise ModelPartMisused("this server has no auxiliary model")
            self._alignments[client] = Alignment(
                copy.deepcopy(self._auxiliary), self.settings.align
            )
        return self._alignments[client]

    def forward(self, client: str, smashed: Smashed) -> Tensor:
        """U-shape: open a step; returns the features that the client's tail is given.

        Raises SmashedRefused.
        """
        pending = self.part(client).forward(smashed)
        self.pending.setdefault(client, deque()).append(pending)
        return pending.features.detach()

    def backward(self, client: str, gradient: Tensor) -> Tensor:
        """U-shape: end the client's oldest open step with the gradient of its features.

        Returns the cut gradient.

        Raises SmashedRefused where no step is open, or the gradient has another shape or is not
        finite.
        """
        waiting = self.pending.get(client)
        if not waiting:
            raise SmashedRefused("a gradient of features came for no open step")
        return self.part(client).backward(waiting.popleft(), gradient)

    def forget(self, client: str) -> None:
        """Drop a client's open steps: its session is gone, their answers would go nowhere."""
        self.pending.pop(client, None)

    def average(self, shares: Mapping[str, float]) -> None:
        """Replicas only.

        Average those of `shares` (in its order), and give the average to every replica.
        """
        # One by one: all replicas at once would take another model of memory for each client.
        exported = (self.part(client).export() for client in shares)
        vector = weights.average(exported, list(shares.values()))
        for part in (self.common, *self._replicas.values()):
            part.load(vector)

    def export(self) -> dict[str, Vector]:
        """New flat fp32 vectors: of the common part (""), and of each replica by its client."""
        return {name: part.export() for name, part in [("", self.common), *self._replicas.items()]}

    @property
    def clients(self) -> Sequence[str]:
        """Those for whom anything is kept."""
        return list({**self._replicas, **self._alignments})

    def state(self, client: str | None = None) -> dict[str, Tensor]:
        """Return named tensors on the CPU: the common part, or all that is kept for one client.

        They are no copies: read them before anything else is computed.
        """
        if client is None:
            return self.common.state()
        found: dict[str, Tensor] = {}
        if client in self._replicas:
            found |= weights.prefixed("replica/", self._replicas[client].state())
        if client in self._alignments:
            found |= weights.prefixed("alignment/", self._alignments[client].state())
        return found

    def restore(self, state: Mapping[str, Tensor], client: str | None = None) -> None:
        """Go on from what `state` gave."""
        if client is None:
            self.common.restore(state)
            return
        if found := weights.under("replica/", state):
            self.part(client).restore(found)
        if found := weights.under("alignment/", state):
            self.alignment(client).restore(found)

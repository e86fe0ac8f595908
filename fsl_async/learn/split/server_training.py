"""Training at the split server: uploads that wait, parts of the model, answers that are kept.

It carries out what the machine (`fsl_async.roles.split.server`) decides, in its training thread,
and answers in the machine's events. An upload that cannot be trained on changes nothing.

Per client it holds nothing but parts of the model and auxiliary models to align, so its memory is
bounded: a replica and its moments (SplitFed V1), or an auxiliary model, its moments and a buffer of
smashed samples (FSL-SAGE), and the steps of a U-shape that are open.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from fsl_async.errors import RunDirError, one_line
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.split import weights
from fsl_async.learn.split.alignment import Alignment
from fsl_async.learn.split.model_parts import ServerPart, ServerPartOptions, ServerPending
from fsl_async.learn.split.payload import (
    IGNORED,
    Payload,
    PayloadError,
    put_back,
    size_of,
    unpack_labels,
)
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.smashed import ModelPartMisused, Smashed, SmashedRefused, payload_of
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.methods import Method
from fsl_async.roles.split.methods.base import (
    Activations,
    AuxiliaryWanted,
    Crossing,
    CutGradient,
    FeatureGradient,
    Features,
)


class SplitServer:
    """x_s and what is kept per client.

    One thread at a time: the order of calls is the order of updates.
    """

    def __init__(
        self, body: nn.Module, settings: ServerPartOptions, auxiliary: nn.Module | None = None
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
        """Return this client's auxiliary model and buffer; at first a copy of the common one."""
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
        """Names of the clients for which anything is kept."""
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


MAX_VALUES = 1 << 28
"""Limit of the values of one upload: 1 GiB."""


@attrs.frozen
class UploadShape:
    """The shape that uploads must have.

    shape: activations of one sample (-1: any size), classes, whether labels are one per token.

    longest: no sequence may have more tokens; 0 where a model has no such limit.
    """

    shape: tuple[int, ...]
    classes: int
    per_token: bool
    longest: int = 0


class ServerTraining:
    """Joins a method, its SplitServer and their disk."""

    def __init__(
        self, method: Method, server: SplitServer, shape: UploadShape, disk: ServerDisk
    ) -> None:
        self.method = method
        self.server = server
        self.shape = shape
        self.disk = disk
        self.uploads: dict[UploadKey, Crossing] = {}
        """Decoded and not trained yet."""
        self.answers: dict[UploadKey, Payload] = {}
        """Kept until their clients have them."""

    def recover(self) -> ev.SplitRecovered:
        """Load the newest good checkpoint. Raises RunDirError, also for one of another model."""
        found = self.disk.recover()
        try:
            if found.common is not None:
                self.server.restore(found.common)
                for name, state in found.clients:
                    self.server.restore(state, name)
        except ModelPartMisused as error:
            # Settings that are fixed were compared before; how many classes there are, the data may
            # say.
            problem = one_line(str(error))[:200]
            raise RunDirError(
                f"{self.disk.run_dir} holds a split server of another model than this start's:"
                f" {problem}; start it with the run's data and settings; for a new run give another"
                " --run-dir"
            ) from error
        return found.recovered

    # --- loop and codec threads ---

    def objection(
        self, shape: Sequence[int], lengths: Sequence[int], samples: int, label_bytes: int
    ) -> str | None:
        """Return why an announced upload is not even received, or None."""
        rows = 2 if lengths else 1
        if size_of(shape) > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
        found = (samples, *shape[1:])
        if lengths:
            if len(lengths) != samples or sum(lengths) != shape[0]:
                return "lengths do not fit the shape"
            found = (samples, max(lengths), *shape[1:])
        elif samples != shape[0]:
            return "samples do not fit the shape"
        wanted, longest = self.shape.shape, self.shape.longest
        if size_of(found) > MAX_VALUES:
            return f"more than {MAX_VALUES} values once padded"
        if longest and not (len(found) > 1 and 0 < found[1] <= longest):
            return f"sequences must have 1 to {longest} tokens, as many as the model sees"
        if self.method.auxiliary == "none" and not label_bytes:
            return None  # a U-shape: the mathematics checks
        fits = len(found) == len(wanted) + 1 and all(
            b in (-1, a) for a, b in zip(found[1:], wanted, strict=True)
        )
        if not fits:
            return f"activations have shape {found[rows - 1 :]}, the cut has {wanted}"
        count = self._labels(shape, lengths, samples)
        return None if label_bytes in (0, count, 2 * count, 4 * count) else "labels do not fit"

    def _labels(self, shape: Sequence[int], lengths: Sequence[int], samples: int) -> int:
        if not self.shape.per_token:
            return samples
        return shape[0] if lengths else shape[0] * shape[1]

    def put(self, key: UploadKey, payload: Payload) -> None:
        """Take a decoded upload. Raises PayloadError."""
        lengths, shape = payload.lengths, payload.shape
        values: Any = payload.values.reshape(shape)
        if lengths:
            values = put_back(values, lengths, max(lengths), 0.0)
        tensor = torch.from_numpy(values)
        if key.leg:
            self.uploads[key] = FeatureGradient(tensor)
            return
        labels: Tensor | None = None
        if payload.labels:
            samples = len(lengths) or shape[0]
            count = self._labels(shape, lengths, samples)
            found: Any = unpack_labels(payload.labels, count, self.shape.classes)
            if lengths and self.shape.per_token:
                found = put_back(found, lengths, max(lengths), IGNORED)
            elif self.shape.per_token:
                found = found.reshape(shape[:2])
            labels = torch.from_numpy(found)
        elif self.method.auxiliary != "none":
            raise PayloadError("activations came without labels")
        given = torch.tensor(lengths) if lengths else None
        self.uploads[key] = Activations(Smashed(tensor, labels, given), wants_answer=True)

    def drop(self, key: UploadKey) -> None:
        """Forget an upload that is not trained."""
        self.uploads.pop(key, None)

    def drop_answer(self, key: UploadKey) -> None:
        """Forget an answer."""
        self.answers.pop(key, None)

    # --- training thread ---

    def train(self, effect: split.TrainUpload) -> ev.UploadTrained:
        """Train on an upload."""
        key = effect.key
        crossing = self.uploads.pop(key)
        part = self.server.part(key.client)
        part.begin_round(key.round)
        updates = part.updates
        try:
            given = self.method.serve(self.server, key.client, crossing)
        except (SmashedRefused, ModelPartMisused) as error:
            return ev.UploadTrained(key, 0.0, updates, problem=str(error)[:400])
        loss = part.last_loss
        if not isinstance(given, CutGradient | Features) or not effect.wants_answer:
            return ev.UploadTrained(key, loss, updates)
        lengths = getattr(getattr(crossing, "smashed", None), "lengths", None)
        self.answers[key] = payload_of(given.values, lengths)
        if isinstance(given, Features):
            loss = 0.0  # it is computed at the client
        return ev.UploadTrained(key, loss, updates, answer=True)

    def align(self, effect: split.Align) -> ev.Aligned:
        """Align a client's auxiliary model."""
        alignment, problem = self.server.alignment(effect.client), None
        before = alignment.export()
        try:
            self.method.serve(self.server, effect.client, AuxiliaryWanted())
            if not np.isfinite(alignment.export()).all():
                problem = "its weights became infinite or NaN"
        except ValueError as error:
            # Batch norm and one sample: what one client sent must not end the split server.
            problem = one_line(str(error))[:400]
        if problem:
            alignment.load(before)
        return ev.Aligned(effect.client, effect.version, problem)

    def auxiliary(self, client: str) -> Vector:
        """Return the auxiliary model that is kept for a client, as it is sent."""
        return self.server.alignment(client).export()

    def average(self, effect: split.AverageReplicas) -> ev.ReplicasAveraged:
        """Average replicas."""
        shares = {name: float(effect.samples[name]) for name in sorted(effect.samples)}
        self.method.end_round(self.server, shares)
        return ev.ReplicasAveraged(effect.round)

    def copy(self, effect: split.Checkpoint) -> Callable[[], None]:
        """Write everything as it is now, into the page cache.

        The job that is returned makes it durable, while training goes on.

        A copy in memory would take as much again as is kept of all clients.
        """
        clients = ((name, self.server.state(name)) for name in self.server.clients)
        return self.disk.stage(effect.progress, self.server.state(), clients)

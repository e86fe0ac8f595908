"""Clients of a run that is killed: real vectors and real frames without training, and what the
world outside the server's folder saw of them.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from fsl_async.roles.sync.events import Attached
from fsl_async.store.errors import LearnError
from fsl_async.store.manifest import Manifest, digest_of
from fsl_async.store.outer import OuterSettings
from fsl_async.tools.sim.counting import CountingLearner, Model
from fsl_codecs import CodecSpec, decode, encode

CHUNK = 48
MANIFEST = Manifest.from_shapes([("layer.weight", (9, 7)), ("layer.bias", (7,))])
OTHER = Manifest.from_shapes([("other", (70,))])
UP, DOWN = CodecSpec(format="bf16", entropy=False), CodecSpec(format="e4m3", entropy=False)
OUTER = OuterSettings("nesterov", 0.7, 0.9)


class VectorLearner(CountingLearner):
    """A client whose base is a real vector and whose deltas are real frames; what a delta holds
    follows from its key alone.
    """

    def __init__(self, world, name, incarnation, clock, on_event, *, step_s, manifest=MANIFEST):
        super().__init__(clock, on_event, step_s=step_s, tokens_per_step=64, initial=0)
        self.world, self.name, self.incarnation = world, name, incarnation
        self.own_manifest = manifest
        self.vector = np.zeros(manifest.values, np.float32)
        self.initial = self.random("initial", 1.0)
        world.truth.initials.append(self.initial)

    def random(self, what, size):
        """Values that follow from the name, the life and `what`."""
        seed = [ord(c) for c in f"{self.name}/{self.incarnation}/{what}"]
        values = np.random.default_rng(seed).standard_normal(self.own_manifest.values)
        return (size * values).astype(np.float32)

    def attach(self):
        """The training function has built its model."""
        self.manifest = self.own_manifest
        self._on_event(Attached(self.manifest.fingerprint, self.manifest.values))

    def encode_initial(self, index):
        """A chunk of this life's own weights."""
        return encode(chunks(self.initial)[index], CodecSpec())

    def adopt_initial(self):
        """They are version 0."""
        self.vector = self.initial
        self.base = Model(0, 0, digest_of(self.initial))
        return self.base.digest

    def encode_delta(self, sequence, index):
        """A chunk of a delta."""
        if sequence not in self._deltas:
            raise LearnError(f"delta {sequence} was dropped")
        frame = encode(chunks(self.random(sequence, 0.1))[index], UP)
        model, tokens = self._deltas[sequence]
        key = (self.name, self.incarnation, sequence)
        self.world.truth.sends(key, index, frame, model, tokens)
        return frame

    def finish_fetch(self, version):
        """Make the base the fetched version."""
        kind, fetched, frames = self._fetch
        assert fetched == version, "what was fetched is applied"
        arrived = np.concatenate([decode(frame) for frame in frames])
        self.vector = arrived if kind == "full" else self.vector + arrived
        self.base = Model(version, 0, digest_of(self.vector))
        self._fetch = None
        self.world.truth.holds(self.name, version, self.base.digest)
        return self.base.digest


def chunks(vector):
    """A vector as the frames have it."""
    return [vector[start : start + CHUNK] for start in range(0, len(vector), CHUNK)]


@define
class Invariants:
    """What the world outside the server's folder saw."""

    frames: dict[tuple[str, int, int], dict[int, bytes]] = field(factory=dict)
    sent: dict[tuple[str, int, int], tuple[Model, int]] = field(factory=dict)
    told: dict[str, None] = field(
        factory=dict
    )  # keys that a client was told, or was being told, are safe
    held: dict[int, set[str]] = field(factory=dict)
    shards: dict[str, set[int]] = field(factory=dict)
    initials: list[np.ndarray] = field(factory=list)  # what each life would have published
    problems: list[str] = field(factory=list)

    def sends(self, key, index, frame, model, tokens):
        """A delta's chunk leaves a client."""
        if self.sent.setdefault(key, (model, tokens)) != (model, tokens):
            self.problems.append(f"delta {key} was recomputed")
        if self.frames.setdefault(key, {}).setdefault(index, frame) != frame:
            self.problems.append(f"chunk {index} of delta {key} was coded anew")

    def holds(self, name, version, digest):
        """A client has a version."""
        self.held.setdefault(version, set()).add(digest)

"""Clients of a run with a crash: real vectors and real frames without training.

And what can be observed of them outside the parameter server's folder.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from fsl_async.roles.sync.events import Attached
from fsl_async.store.digest import digest_of
from fsl_async.store.errors import LearnError
from fsl_async.store.manifest import Manifest
from fsl_async.store.outer import OuterSettings
from fsl_async.tools.sim.counting import CountingLearner, Model
from fsl_codecs import CodecSpec, decode, encode

CHUNK = 48
MANIFEST = Manifest.from_shapes([("layer.weight", (9, 7)), ("layer.bias", (7,))])
OTHER = Manifest.from_shapes([("other", (70,))])
UP, DOWN = CodecSpec(format="bf16", entropy=False), CodecSpec(format="e4m3", entropy=False)
OUTER = OuterSettings("nesterov", 0.7, 0.9)
MAX_STALENESS = 4


class VectorLearner(CountingLearner):
    """A client with a real vector as its base and real frames; a delta's content depends on its key
    alone.
    """

    def __init__(self, world, name, incarnation, clock, on_event, *, step_s, manifest=MANIFEST):
        super().__init__(clock, on_event, step_s=step_s, tokens_per_step=64, initial=0)
        self.world, self.name, self.incarnation = world, name, incarnation
        self.own_manifest = manifest
        self.vector = np.zeros(manifest.values, np.float32)
        self.initial = self.random("initial", 1.0)
        world.observed.initials.append(self.initial)

    def random(self, what, size):
        """Return values that depend on the name, the incarnation and `what`."""
        seed = [ord(c) for c in f"{self.name}/{self.incarnation}/{what}"]
        values = np.random.default_rng(seed).standard_normal(self.own_manifest.values)
        return (size * values).astype(np.float32)

    def attach(self):
        """Attach the model, as the training function does when it has built it."""
        self.manifest = self.own_manifest
        self._on_event(Attached(self.manifest.fingerprint, self.manifest.values))

    def encode_initial(self, index):
        """Encode a chunk of this incarnation's own initial weights."""
        return encode(chunks(self.initial)[index], CodecSpec())

    def adopt_initial(self):
        """Make them version 0; returns its digest."""
        self.vector = self.initial
        self.base = Model(0, 0, digest_of(self.initial))
        return self.base.digest

    def scalars_frame(self, sequence):
        """Return None: a delta is chunks."""

    def delta_frames(self, sequence):
        """Return the number of chunks."""
        return MANIFEST.chunks

    def encode_delta(self, sequence, index):
        """Encode a chunk of a delta."""
        if sequence not in self._deltas:
            raise LearnError(f"delta {sequence} was dropped")
        frame = encode(chunks(self.random(sequence, 0.1))[index], UP)
        model, tokens = self._deltas[sequence]
        key = (self.name, self.incarnation, sequence)
        self.world.observed.sends(key, index, frame, model, tokens)
        return frame

    def finish_fetch(self, version):
        """Make the fetched version the base; returns its digest."""
        kind, fetched, frames = self._fetch
        assert fetched == version, "what was fetched is applied"
        arrived = np.concatenate([decode(frame) for frame in frames])
        self.vector = arrived if kind == "full" else self.vector + arrived
        self.base = Model(version, 0, digest_of(self.vector))
        self._fetch = None
        self.world.observed.holds(self.name, version, self.base.digest)
        return self.base.digest


def chunks(vector):
    """Split a vector into the values of each frame."""
    return [vector[start : start + CHUNK] for start in range(0, len(vector), CHUNK)]


@define
class Observed:
    """What was observed outside the parameter server's folder."""

    frames: dict[tuple[str, int, int], dict[int, bytes]] = field(factory=dict)
    sent: dict[tuple[str, int, int], tuple[Model, int]] = field(factory=dict)
    # keys whose acknowledgement was sent, received or not
    acknowledged: dict[str, None] = field(factory=dict)
    held: dict[int, set[str]] = field(factory=dict)
    shards: dict[str, set[int]] = field(factory=dict)
    # what each incarnation would have published
    initials: list[np.ndarray] = field(factory=list)
    problems: list[str] = field(factory=list)

    def sends(self, key, index, frame, model, tokens):
        """Record a delta's chunk that a client sends."""
        if self.sent.setdefault(key, (model, tokens)) != (model, tokens):
            self.problems.append(f"delta {key} was recomputed")
        if self.frames.setdefault(key, {}).setdefault(index, frame) != frame:
            self.problems.append(f"chunk {index} of delta {key} was encoded differently")

    def holds(self, name, version, digest):
        """Record that a client holds a version."""
        self.held.setdefault(version, set()).add(digest)

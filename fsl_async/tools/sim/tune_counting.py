"""Tuning replaced by counting: rounds with adapters by a product rule, and rounds of zeroth order.

A client trains a round when it is called, and its delta is the tokens of that round. A version is
made from the deltas of its own round; a late one enters it without weight, as in the real store.

In a run of zeroth order a delta is a frame of two scalars, its tokens and a projected gradient, and
a version is the two scalars that clients replay: the tokens merged, and the mean of the gradients.
The digest of a version is a hash over all of them in order, so a version that is missed, doubled or
replayed out of order gives a wrong digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve, field, mutable

from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta
from fsl_async.roles.sync.events import Recovered, Snapshotted
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.delta_kind import DeltaKind, Seeds
from fsl_async.store.errors import FrameRefused, LearnerError, StoreError
from fsl_async.store.merging import AT_START, Average
from fsl_async.store.records import Committed, Outcome, SpoolResult
from fsl_async.store.seed_step import Directions
from fsl_async.tools.sim.counting import (
    CHUNKS,
    CountingLearner,
    CountingStore,
    Disk,
    Model,
)
from fsl_codecs import CodecError, decode_seeds, encode_seeds
from fsl_transport import Scheduler

ROUND_STEPS = 4
"""Of a client in a round."""
FULL_PADDING = "." * 2000
"""In each chunk of a full version: it takes a slow link longer than a round."""
SKIPS = 0.01
"""Share of rounds in which a client trains nothing."""
DIRECTIONS = Directions(seed=1, steps=1, probes=2, rate=1.0)


def digest_after(parent: str, version: int, step: bytes) -> str:
    """Return the digest of a version that a step leads to."""
    return hashlib.sha256(f"{parent}|{version}|{step.hex()}".encode()).hexdigest()[:32]


@mutable
class TuneDisk(Disk):
    """What a parameter server has made durable.

    weights: of the deltas in the newest version. steps: version -> its two scalars, of all
    versions; the store serves the newest only.
    """

    weights: dict[DeltaKey, float] = field(factory=dict)
    gradients: dict[DeltaKey, float] = field(factory=dict)
    quarantined: dict[DeltaKey, str] = field(factory=dict)
    steps: dict[int, bytes] = field(factory=dict)
    kept_from: int | None = None
    full_reads: int = 0
    replays: int = 0


class RoundStore(CountingStore):
    """A store that merges by a product rule: deltas of another round have no weight.

    fails: returns whether the disk fails now, before anything has changed.
    """

    disk: TuneDisk

    def __init__(
        self,
        disk: TuneDisk,
        keep_versions: int,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], object]], object],
        *,
        fails: Callable[[], bool],
    ) -> None:
        super().__init__(disk, keep_versions, clock, later)
        self._fails = fails

    def _try_disk(self) -> None:
        if self._fails():
            raise StoreError("the disk is full")

    def spool_finish(self, key: DeltaKey) -> SpoolResult:
        """See `CountingStore.spool_finish`."""
        self._try_disk()
        return super().spool_finish(key)

    def advance(self, average: Average) -> Committed:
        """See `CountingStore.advance`."""
        self._try_disk()
        return super().advance(average)

    def keep_from(self, version: int | None) -> None:
        """See `CountingStore.keep_from`."""
        super().keep_from(version)
        self.disk.kept_from = version

    def average(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition = AT_START,
        *,
        reused: Sequence[MergedDelta] = (),
    ) -> Average:
        """See `CountingStore.average`."""
        assert {one.key for one in merged} == self._accumulated.keys(), "all of them are merged"
        assert all(one.weight <= self._accumulated[one.key] for one in merged), "none counts more"
        made = super().average(version, merged, scale, position, reused=reused)
        fresh = [one if one.key.base == version - 1 else evolve(one, weight=0.0) for one in merged]
        return evolve(made, merged=tuple(fresh))

    def _next(self, last: Model, average: Average, tokens: int) -> Model:
        self.disk.weights = {one.key: one.weight for one in average.merged}
        return super()._next(last, average, tokens)

    def read_full(self, version: int, index: int) -> bytes | None:
        """See `CountingStore.read_full`."""
        self.disk.full_reads += not index
        return super().read_full(version, index)


class ZerothStore(RoundStore):
    """A store of a run of zeroth order. history: versions whose scalars are served."""

    def __init__(
        self,
        disk: TuneDisk,
        keep_versions: int,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], object]], object],
        *,
        fails: Callable[[], bool],
        history: int,
    ) -> None:
        super().__init__(disk, keep_versions, clock, later, fails=fails)
        self._history = history
        self._frames: dict[DeltaKey, tuple[Delta, bytes | None]] = {}

    @property
    def kind(self) -> DeltaKind:
        """The production kind."""
        return Seeds(DIRECTIONS)

    def recover(self) -> Recovered:
        """See `CountingStore.recover`."""
        found = super().recover()
        settled = {**found.settled, **dict.fromkeys(self.disk.quarantined, "quarantined")}
        return evolve(found, settled=settled)

    def known(self, key: DeltaKey) -> Outcome | None:
        """See `CountingStore.known`."""
        return "quarantined" if key in self.disk.quarantined else super().known(key)

    def spool_begin(self, delta: Delta, weight: float | None = None) -> Outcome | None:
        """Start a delta."""
        known = self.known(delta.key)
        if known is None:
            self._frames.setdefault(delta.key, (delta, None))
        return known

    def spool_next_chunk(self, key: DeltaKey) -> int:
        """Return 1 if the frame is here."""
        return int(self._frames[key][1] is not None)

    def spool_write(self, key: DeltaKey, index: int, frame: bytes) -> None:
        """Take the frame; a repeated one is ignored."""
        if key not in self._frames or index:
            return
        if DIRECTIONS.check(frame).first != key.base:
            raise FrameRefused(f"delta {key.text} is of another round than its frame")
        delta, before = self._frames[key]
        assert before in {None, frame}, "a delta is the same each time"
        self._frames[key] = delta, frame

    def spool_finish(self, key: DeltaKey) -> SpoolResult:
        """Make a delta durable, or exclude it if it is not finite."""
        self._try_disk()
        delta, frame = self._frames.pop(key, (None, None))
        if delta is None:
            raise StoreError(f"delta {key.text} was not begun")
        assert frame is not None, "a delta is acknowledged only when it is complete"
        tokens, gradient = decode_seeds(frame).scalars.ravel().tolist()
        assert tokens == delta.tokens, "a delta must arrive as it was computed"
        if not math.isfinite(gradient):
            self.disk.quarantined[key] = "it holds NaN or infinity"
            return SpoolResult(StoredDelta(delta), self.disk.quarantined[key])
        stored = StoredDelta(delta, len(frame), abs(gradient))
        self.disk.pending[key] = stored
        self.disk.gradients[key] = gradient
        return SpoolResult(stored)

    def _next(self, last: Model, average: Average, tokens: int) -> Model:
        super()._next(last, average, tokens)
        fresh = [one for one in average.merged if one.weight]
        total = math.fsum(one.weight for one in fresh)
        mean = math.fsum(one.weight * self.disk.gradients[one.key] for one in fresh)
        step = np.array([tokens, mean / (total or 1.0)], "<f4").tobytes()
        self.disk.steps[average.version] = step
        digest = digest_after(last.digest, average.version, step)
        return Model(average.version, last.total + tokens, digest)

    def read_seeds(self, since: int, version: int) -> bytes | None:
        """Return the frame of the steps from version `since` to `version`."""
        newest = self.disk.models[-1].version
        if not newest - self._history <= since < version <= newest:
            return None
        self.disk.replays += 1
        steps = [self.disk.steps[number] for number in range(since + 1, version + 1)]
        scalars = np.frombuffer(b"".join(steps), "<f4").astype(np.float32)
        return encode_seeds(since, scalars.reshape(-1, 1, 2))

    def has_update(self, version: int) -> bool:
        """No: versions are scalars."""
        return False

    def read_full(self, version: int, index: int) -> bytes | None:
        """See `CountingStore.read_full`; with padding."""
        if super().read_full(version, index) is None:
            return None
        model = self.disk.models[version]
        return json.dumps([model.total, model.digest, FULL_PADDING]).encode()


class RoundLearner(CountingLearner):
    """A training thread that trains rounds when it is called, and waits in between.

    chance: decides in which rounds it trains nothing. fails: in a run of zeroth order, the
    probability that it measures what is not finite, and that it cannot replay a frame.
    """

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        *,
        step_s: float,
        tokens_per_step: int,
        initial: int,
        chance: random.Random,
        fails: float,
    ) -> None:
        super().__init__(
            clock, on_event, step_s=step_s, tokens_per_step=tokens_per_step, initial=initial
        )
        self.applied: list[tuple[int, bytes]] = []
        """(version, its scalars) replayed since the invariants were last checked."""
        self._chance = chance
        self._fails = fails
        self._tokens = 0
        self._sent = 0

    @property
    def trained_tokens(self) -> int:
        """Tokens of complete rounds."""
        return self._tokens

    @property
    def sent_tokens(self) -> int:
        """Tokens that are in a snapshot."""
        return self._sent

    def _at_next_step(self, action: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.time(), action)

    def begin_round(self, sequence: int, number: int) -> None:
        """Train a round, then copy the weights and wait."""
        assert self.model.version == number, "a round is trained from its version"
        steps = 0 if self._chance.random() < SKIPS else ROUND_STEPS
        ends_at = self._clock.time() + ROUND_STEPS * self._step_s
        self._clock.call_at(ends_at, self._end_round, sequence, steps)

    def _end_round(self, sequence: int, steps: int) -> None:
        if not self._over:
            self._tokens += steps * self._tokens_per_step
            self._snapshot(sequence, hold=True)

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        tokens, self._sent = self._tokens - self._sent, self._tokens
        self._deltas[sequence] = (self.model, tokens)
        steps = tokens // self._tokens_per_step
        self._on_event(Snapshotted(sequence, self.model.version, tokens, steps))

    def resume(self) -> None:
        """Go on to wait for the next round."""


class ZerothLearner(RoundLearner):
    """A training thread of zeroth order. It replays the scalars of versions on its base."""

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        *,
        step_s: float,
        tokens_per_step: int,
        initial: int,
        chance: random.Random,
        fails: float,
    ) -> None:
        super().__init__(
            clock,
            on_event,
            step_s=step_s,
            tokens_per_step=tokens_per_step,
            initial=initial,
            chance=chance,
            fails=fails,
        )
        self._measured: dict[int, bytes] = {}
        self._replayed: tuple[int, Model, list[tuple[int, bytes]]] | None = None

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        tokens = self._tokens - self._sent
        failed = self._chance.random() < self._fails
        gradient = math.nan if failed else self._chance.uniform(-1.0, 1.0)
        scalars = np.array([[[tokens, gradient]]], np.float32)
        if tokens:
            self._measured[sequence] = encode_seeds(self.model.version, scalars)
        super()._snapshot(sequence, hold=hold)

    def scalars_frame(self, sequence: int) -> bytes | None:
        """Return the frame of a delta."""
        return self._measured.get(sequence)

    def delta_frames(self, sequence: int) -> int:
        """Return 1."""
        return 1

    def encode_delta(self, sequence: int, index: int) -> bytes:
        """Return the frame of a delta."""
        if sequence not in self._measured:
            raise LearnerError(f"delta {sequence} was dropped")
        return self._measured[sequence]

    def drop_delta(self, sequence: int) -> None:
        """Forget a delta."""
        super().drop_delta(sequence)
        self._measured.pop(sequence, None)

    def begin_fetch(self, kind: str, version: int) -> None:
        """Start to fetch a version; an unfinished fetch is given up."""
        self._replayed = None
        if kind == "full":
            super().begin_fetch(kind, version)
            return
        assert kind == "seeds", "versions are scalars"
        if not 0 <= self.base.version < version:
            raise LearnerError(f"scalars to version {version} do not follow the base")
        self._fetch = (kind, version, [None] * CHUNKS)

    def put_fetch(self, version: int, index: int, frame: bytes) -> None:
        """Add a chunk, or replay scalars beside the base."""
        if self._fetch is None or self._fetch[0] != "seeds" or self._fetch[1] != version:
            super().put_fetch(version, index, frame)
            return
        try:
            found = decode_seeds(frame)
        except CodecError as error:
            raise LearnerError(str(error)) from error
        if self._chance.random() < self._fails:
            raise LearnerError("not enough memory")
        since, rounds = self.base.version, len(found.scalars)
        if not found.first <= since < found.first + rounds == version:
            text = f"scalars from {found.first} to {found.first + rounds}, expected from {since}"
            raise LearnerError(text)
        total, digest, applied = self.base.total, self.base.digest, []
        for number, scalars in enumerate(found.scalars[since - found.first :], since + 1):
            step = scalars.astype("<f4").tobytes()
            total += int(scalars[0, 0])
            digest = digest_after(digest, number, step)
            applied.append((number, step))
        self._replayed = version, Model(version, total, digest), applied

    def finish_fetch(self, version: int) -> str:
        """Make the fetched version the base."""
        assert self._fetch is not None, "what was fetched is applied"
        if self._fetch[0] != "seeds":
            return self._finish_full(version)
        assert self._replayed is not None, "what was fetched is applied"
        replayed, self.base, applied = self._replayed
        assert replayed == version, "what was fetched is applied"
        self.applied += applied
        self._fetch = self._replayed = None
        return self.base.digest

    def _finish_full(self, version: int) -> str:
        assert self._fetch is not None
        _, fetched, frames = self._fetch
        assert fetched == version, "what was fetched is applied"
        assert all(frame is not None and frame == frames[0] for frame in frames), (
            "chunks of one version"
        )
        total, digest, _ = json.loads(frames[0] or b"")
        self.base = Model(version, total, digest)
        self.applied.clear()
        self._fetch = None
        return self.base.digest

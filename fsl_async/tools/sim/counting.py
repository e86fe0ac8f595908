"""Learning replaced by counting: a store and a learner with the guarantees of the real ones and
integers as weights.

A model is one number, the tokens that went into it; a delta is the tokens trained since the last
snapshot; a digest is a hash over the lineage of versions. So whatever would corrupt real weights (a
delta merged twice, lost, or applied to another base; an update applied to another version) gives a
wrong number or a wrong digest here. `Disk` survives the parameter server's process; everything else
is lost with it. A job of the worker happens completely or not at all: crashes inside one are the
store's own tests.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import Factory, field, frozen, mutable

from fsl_async.roles.machine import Event, TrainingEnded
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta
from fsl_async.roles.sync.events import Attached, PaceReached, Rebased, Recovered, Snapshotted
from fsl_async.roles.sync.progress import Decay, RunPosition
from fsl_async.store.delta_kind import DeltaKind, Dense
from fsl_async.store.errors import LearnError, StoreError
from fsl_async.store.manifest import CHUNK_VALUES, Manifest
from fsl_async.store.merging import AT_START, Average
from fsl_async.store.records import Committed, Outcome, SpoolResult
from fsl_transport import Scheduler

T = TypeVar("T")
CHUNKS = 2
_DENSE = Dense()
CHECKPOINT_S = 45.0
"""How long a checkpoint takes, by the clock of the simulation: the limit of bytes a second."""
CHECKPOINT_EVERY = 10
"""Versions after which a commit waits for one."""
MANIFEST = Manifest.from_shapes([("count", (CHUNKS * CHUNK_VALUES,))])


def digest_of(parent: str, version: int, total: int) -> str:
    """Return the digest of a version: a hash of its lineage, number and tokens."""
    return hashlib.sha256(f"{parent}|{version}|{total}".encode()).hexdigest()[:32]


def frame_of(*values: int | str) -> bytes:
    """Code a chunk."""
    return json.dumps(values).encode()


@frozen
class Model:
    """A version: the tokens merged so far, and the digest of its lineage."""

    version: int = -1
    total: int = 0
    digest: str = ""


@mutable
class Disk:
    """What a parameter server has made durable."""

    models: list[Model] = field(factory=list)
    pending: dict[DeltaKey, StoredDelta] = field(factory=dict)
    merged: dict[DeltaKey, int] = field(factory=dict)
    leases: dict[str, int] = field(factory=dict)
    provisional: set[str] = field(factory=set)
    incarnations: dict[str, int] = field(factory=dict)
    tokens_merged: int = 0
    version_at: float = 0.0  # by the clock of the simulation
    oldest: int = 0  # oldest version that is kept; pruned ones are gone
    whole: int = 0  # newest version whose weights are on disk; later ones are made again
    spool: dict[DeltaKey, int] = field(factory=dict)  # tokens of deltas merged after that one
    checkpoints: int = 0  # versions that became whole
    replayed: int = 0  # versions made again by starts


@mutable
class _Spool:
    delta: Delta
    tokens: int = 0
    next_chunk: int = 0


class CountingStore:
    """A store with the real one's guarantees, on a `Disk`. Every method is one job of the
    worker.
    """

    def __init__(
        self,
        disk: Disk,
        keep_versions: int,
        clock: Callable[[], float] = lambda: 0.0,
        later: Callable[[float, Callable[[], object]], object] | None = None,
    ) -> None:
        """later: calls a function at a given time, if the process still lives."""
        self.disk = disk
        self.keep_versions = keep_versions
        self._clock = clock
        self._later = later
        self._spools: dict[DeltaKey, _Spool] = {}
        self._accumulated: dict[DeltaKey, float] = {}
        self._initial = 0
        self._serving_from: int | None = None

    def recover(self) -> Recovered:
        """Return what a new process recovers."""
        disk = self.disk
        last = disk.models[-1] if disk.models else Model()
        if disk.models:
            total = disk.models[disk.whole].total
            for key, version in disk.merged.items():
                if version > disk.whole:
                    assert key in disk.spool, "what no checkpoint holds stays in the spool"
                    total += disk.spool[key]
            assert total == last.total, "the newest version is made again as it was"
            disk.replayed += last.version - disk.whole
        return Recovered(
            version=last.version,
            digest=last.digest,
            pending=tuple(disk.pending.values()),
            settled=dict.fromkeys(disk.merged, "merged"),
            digests={model.version: model.digest for model in disk.models[-self.keep_versions :]},
            leases=dict(disk.leases),
            provisional=frozenset(disk.provisional),
            incarnations=dict(disk.incarnations),
            run="sim",
            tokens_total=disk.tokens_merged,
            since_version_s=self._clock() - disk.version_at,
        )

    @property
    def manifest(self) -> Manifest:
        """The manifest of the only model."""
        return MANIFEST

    def begin_initial(self, manifest: Manifest) -> None:
        """Start version 0."""
        self._initial = 0

    def write_initial(self, index: int, frame: bytes) -> None:
        """Add a chunk of version 0."""
        self._initial += json.loads(frame)[0]

    def finish_initial(self) -> Committed:
        """Make version 0 durable."""
        assert not self.disk.models, (
            "a fresh node's weights must never replace a version that exists"
        )
        model = Model(0, self._initial, digest_of("", 0, self._initial))
        self.disk.models.append(model)
        return Committed(0, model.digest, 0, CHUNKS, 0.0)

    def known(self, key: DeltaKey) -> Outcome | None:
        """Return the outcome of a delta."""
        if key in self.disk.pending:
            return "accepted"
        return "merged" if key in self.disk.merged else None

    def spool_begin(self, delta: Delta, weight: float | None = None) -> Outcome | None:
        """Start or continue a delta."""
        known = self.known(delta.key)
        if known is None:
            self._spools.setdefault(delta.key, _Spool(delta))
        return known

    def spool_next_chunk(self, key: DeltaKey) -> int:
        """Return the next chunk of a delta."""
        return self._spools[key].next_chunk

    def record_decay(self, decay: Decay) -> None:
        """Never called: the simulator has no operator."""
        raise NotImplementedError

    def spool_write(self, key: DeltaKey, index: int, frame: bytes) -> None:
        """Add a chunk; a repeated one is ignored."""
        spool = self._spools.get(key)
        if spool is None or index != spool.next_chunk:
            return
        spool.tokens += json.loads(frame)[0]
        spool.next_chunk += 1

    def spool_finish(self, key: DeltaKey) -> SpoolResult:
        """Make a delta durable. StoreError when it is not being received: another stream has
        brought it.
        """
        spool = self._spools.pop(key, None)
        if spool is None:
            raise StoreError(f"delta {key.text} was not begun")
        assert spool.next_chunk == CHUNKS, "a delta is acknowledged only when it is complete"
        assert spool.tokens == spool.delta.tokens, "a delta must arrive as it was computed"
        stored = StoredDelta(spool.delta, CHUNKS * 8, float(spool.tokens))
        self.disk.pending[key] = stored
        return SpoolResult(stored)

    def quarantine(self, key: DeltaKey, reason: str, *, held: bool = False) -> None:
        """Never called: the simulator quarantines nothing."""
        raise NotImplementedError

    def release(self, key: DeltaKey) -> None:
        """As `quarantine`."""
        raise NotImplementedError

    def accumulate(self, key: DeltaKey, weight: float) -> None:
        """Add a delta to the accumulator, which is lost with the process."""
        assert key in self.disk.pending, "only a durable delta may be accumulated"
        assert key not in self._accumulated, "a delta is accumulated once"
        self._accumulated[key] = weight

    @property
    def kind(self) -> DeltaKind:
        """The kind of delta, with the production kind's size."""
        return _DENSE

    def average(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition = AT_START,
        *,
        reused: Sequence[MergedDelta] = (),
    ) -> Average:
        """Return the next version's average; its only value is its tokens."""
        assert {m.key for m in merged} == set(self._accumulated), (
            "what is merged is what was accumulated"
        )
        weights = math.fsum(one.weight for one in merged)
        return Average(version, tuple(merged), scale, weights, position, lambda: ())

    def advance(self, average: Average) -> Committed:
        """Make the next version durable: in one step, as the rename of a checkpoint is."""
        disk, last = self.disk, self.disk.models[-1]
        version, merged = average.version, average.merged
        assert version == last.version + 1, "versions follow one another"
        if version - disk.whole > CHECKPOINT_EVERY:
            self._checkpoint(last.version)  # the commit waits for it
        assert {m.key for m in merged} == set(self._accumulated), (
            "what is merged is what was accumulated"
        )
        self._accumulated.clear()
        tokens = 0
        for one in merged:
            assert one.key not in disk.merged, "a delta is merged at most once"
            del disk.pending[one.key]
            disk.merged[one.key] = version
            disk.spool[one.key] = one.delta.tokens
            tokens += one.delta.tokens
        disk.tokens_merged += tokens
        model = self._next(last, average, tokens)
        disk.models.append(model)
        disk.version_at = self._clock()
        if self._later is None:
            self._checkpoint(version)
        else:
            self._later(self._clock() + CHECKPOINT_S, lambda: self._checkpoint(version))
        self._prune(version)
        return Committed(version, model.digest, CHUNKS * 8, CHUNKS, 0.0)

    def _prune(self, version: int) -> None:
        """Forget versions that are too old, now that this one is there."""
        oldest = version - self.keep_versions + 1
        if self._serving_from is not None:
            oldest = min(oldest, self._serving_from)
        self.disk.oldest = max(self.disk.oldest, oldest)

    def _next(self, last: Model, average: Average, tokens: int) -> Model:
        """The version that comes of an average of so many tokens."""
        total = last.total + tokens
        return Model(average.version, total, digest_of(last.digest, average.version, total))

    def _checkpoint(self, version: int) -> None:
        """Make a version whole, unless a later one has taken its place in memory."""
        disk = self.disk
        if version == disk.models[-1].version > disk.whole:
            disk.whole = version
            disk.checkpoints += 1
            disk.spool.clear()

    def lease(
        self, name: str, limit: int, index: int | None = None, *, provisional: bool = False
    ) -> int | None:
        """Return a client's data shard, as the real store assigns it."""
        leases, loose = self.disk.leases, self.disk.provisional
        if name not in leases:
            assert index is not None, "the shell knows which shard it tells the client"
            for other in [other for other in loose if leases[other] == index]:
                del leases[other]
                loose.discard(other)
            assert index not in leases.values(), "no two clients may train the same data"
            leases[name] = index
            loose.add(name)
        if not provisional:
            loose.discard(name)
        return leases[name]

    def position(self, name: str) -> dict[str, float]:
        """Where a client is in its data: clients here have none."""
        return {}

    def record_incarnation(self, name: str, incarnation: int) -> None:
        """Record the newest incarnation of a client."""
        self.disk.incarnations[name] = max(incarnation, self.disk.incarnations.get(name, -1))

    def keep_from(self, version: int | None) -> None:
        """Keep versions from this one on: a client fetches it."""
        self._serving_from = version

    def read_seeds(self, since: int, version: int) -> bytes | None:
        """Return None: versions are no scalars."""
        return None

    def has_global_update(self, version: int) -> bool:
        """There are no groups here."""
        return False

    def read_global_update(self, version: int, index: int) -> bytes | None:
        """There are no groups here."""
        return None

    def has_update(self, version: int) -> bool:
        """Whether the update to a version is kept."""
        return max(1, self.disk.oldest) <= version <= self.disk.models[-1].version

    def update_in_memory(self, version: int, index: int) -> bytes | None:
        """Nothing: a simulated disk is as quick as memory, and can fail."""
        return None

    def read_update(self, version: int, index: int) -> bytes | None:
        """Return a chunk of the update from the version before."""
        if not self.has_update(version):
            return None
        return frame_of(self.disk.models[version].total)

    def verify(self, version: int) -> bool:
        """Find no damage: the simulated disk has none."""
        return True

    def read_full(self, version: int, index: int) -> bytes | None:
        """Return a chunk of a full version."""
        if version < self.disk.oldest:
            return None
        model = self.disk.models[version]
        return frame_of(model.total, model.digest)


class CountingLearner:
    """A client that trains `tokens_per_step` every `step_s` and answers at step boundaries, as a
    training thread does.
    """

    global_digest = ""
    """It keeps no global weights."""

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        *,
        step_s: float,
        tokens_per_step: int,
        initial: int,
        own_pace: Callable[[], int] | None = None,
    ) -> None:
        """own_pace: after how many steps its task asks to send the next time."""
        self.manifest: Manifest | None = None
        self.base = Model()
        self.model = Model()
        self.refused: str | None = None
        self._clock = clock
        self._on_event = on_event
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._initial = initial
        self._started_at: float | None = None
        self._held_at: float | None = None
        self._over = False
        self._sent_steps = 0
        self._pace_steps = 0
        self._pace_number = 0
        self._own_pace = own_pace
        self._deltas: dict[int, tuple[Model, int]] = {}
        self._fetch: tuple[str, int, list[bytes | None]] | None = None

    def attach(self) -> None:
        """Attach the model, as the training function does when it has built it."""
        self.manifest = MANIFEST
        self._on_event(Attached(MANIFEST.fingerprint, MANIFEST.values))

    @property
    def steps(self) -> int:
        """Steps trained in this incarnation."""
        if self._started_at is None:
            return 0
        now = self._clock.time() if self._held_at is None else self._held_at
        return int((now - self._started_at) / self._step_s + 1e-9)

    @property
    def is_held(self) -> bool:
        """Whether training waits in a step."""
        return self._held_at is not None

    @property
    def trained_tokens(self) -> int:
        """Tokens trained in this incarnation."""
        return self.steps * self._tokens_per_step

    @property
    def sent_tokens(self) -> int:
        """Tokens of this incarnation that are in some snapshot."""
        return self._sent_steps * self._tokens_per_step

    def _at_next_step(self, action: Callable[[], None]) -> None:
        now = self._clock.time()
        if self._started_at is None or self._held_at is not None:
            self._clock.call_at(now, action)
            return
        self._clock.call_at(self._started_at + (self.steps + 1) * self._step_s, action)

    def request_snapshot(self, sequence: int, *, hold: bool = False) -> None:
        """Take a snapshot at the next step; with `hold`, begin no further step."""
        self._at_next_step(lambda: self._snapshot(sequence, hold=hold))

    def begin_round(self, sequence: int, number: int) -> None:
        """Train one step: the training function has no rounds."""
        self.request_snapshot(sequence, hold=True)

    def count_steps(self, steps: int) -> None:
        """Report so many steps after each snapshot."""
        self._pace_steps = steps
        self._await_pace()

    def _await_pace(self) -> None:
        """Plan the report of the steps of the pace, instead of the one planned before."""
        self._pace_number += 1
        steps = self._own_pace() if self._own_pace is not None else self._pace_steps
        if not steps or self._started_at is None or self._held_at is not None:
            return
        last = self._sent_steps + steps
        at = max(self._clock.time(), self._started_at + last * self._step_s)
        self._clock.call_at(at, self._report_pace, self._pace_number)

    def _report_pace(self, number: int) -> None:
        if number == self._pace_number and self._held_at is None:
            self._on_event(PaceReached())

    def resume(self) -> None:
        """Train on after a hold."""
        if self._held_at is not None and not self._over:
            assert self._started_at is not None
            self._started_at += self._clock.time() - self._held_at
            self._held_at = None
            self._await_pace()

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        if hold and self._held_at is None:
            self._held_at = self._clock.time()
        steps = self.steps - self._sent_steps
        self._sent_steps = self.steps
        self._await_pace()
        tokens = steps * self._tokens_per_step
        self._deltas[sequence] = (self.model, tokens)
        self._on_event(Snapshotted(sequence, self.model.version, tokens, steps))

    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None:
        """Rebase at the next step."""
        assert (self.base.version, self.base.digest) == (version, digest)
        self._at_next_step(self._rebase)

    def _rebase(self) -> None:
        if self._started_at is None:
            self._started_at = self._clock.time()
            self._await_pace()
        self.model = self.base
        self._on_event(Rebased(self.base.version))

    def encode_initial(self, index: int) -> bytes:
        """Encode a chunk of this incarnation's own initial number."""
        return frame_of(self._initial if index == 0 else 0)

    def adopt_initial(self) -> str:
        """Make the own number version 0."""
        self.base = Model(0, self._initial, digest_of("", 0, self._initial))
        return self.base.digest

    def scalars_frame(self, sequence: int) -> bytes | None:
        """Return None: a delta is chunks."""
        return None

    def delta_frames(self, sequence: int) -> int:
        """Return the number of chunks."""
        return CHUNKS

    def encode_delta(self, sequence: int, index: int) -> bytes:
        """Encode a chunk of a delta: its tokens, split in two."""
        if sequence not in self._deltas:
            raise LearnError(f"delta {sequence} was dropped")
        _, tokens = self._deltas[sequence]
        half = tokens // CHUNKS
        return frame_of(half if index else tokens - (CHUNKS - 1) * half)

    def finish_encoding(self, sequence: int) -> None:
        """Do nothing: a number is encoded when it is requested."""

    def drop_delta(self, sequence: int) -> None:
        """Forget a delta."""
        self._deltas.pop(sequence, None)

    def begin_fetch(self, kind: str, version: int) -> None:
        """Start to fetch a version."""
        kind = "full" if kind == "global_full" else kind
        assert kind == "full" or version == self.base.version + 1, "an update follows its base"
        self._fetch = (kind, version, [None] * CHUNKS)

    def put_fetch(self, version: int, index: int, frame: bytes) -> None:
        """Add a chunk. A late one, of an earlier stream, is refused as the real learner does."""
        if self._fetch is None or self._fetch[1] != version:
            raise LearnError(f"version {version} is not being fetched")
        self._fetch[2][index] = frame

    def finish_fetch(self, version: int) -> str:
        """Make the fetched version the base; its digest is computed from the present base."""
        assert self._fetch is not None
        kind, fetched, frames = self._fetch
        assert fetched == version, "what was fetched is applied"
        assert all(frame is not None and frame == frames[0] for frame in frames), (
            "chunks of one version"
        )
        content = json.loads(frames[0] or b"")
        digest = content[1] if kind == "full" else digest_of(self.base.digest, version, content[0])
        self.base = Model(version, content[0], digest)
        self._fetch = None
        return digest

    def stop(self) -> None:
        """End training at the next step."""
        self._at_next_step(self._end)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._held_at is None:
                self._held_at = self._clock.time()
            self._on_event(TrainingEnded(None))

    def refuse(self, code: str, text: str) -> None:
        """Record that the parameter server refuses this client."""
        self.refused = text


@mutable
class VirtualWorker:
    """A worker on the virtual clock: jobs take `cost_s` each, one after another, and run at their
    end. Their results are reported `report_s` later.
    """

    clock: Scheduler
    cost_s: Callable[[], float]
    report_s: float = 0.0
    _free_at: float = Factory(lambda: 0.0)
    _closed: bool = False

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        """Queue a job."""
        self._free_at = max(self._free_at, self.clock.time()) + self.cost_s()
        self.clock.call_at(self._free_at, self._run, job, done, failed)

    def _run(
        self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        if self._closed:
            return
        try:
            result = job()
        except LearnError as error:
            self._report(failed, error)
        else:
            self._report(done, result)

    def _report(self, take: Callable[[T], None], result: T) -> None:
        if self.report_s:
            self.clock.call_at(self.clock.time() + self.report_s, take, result)
        else:
            take(result)

    def close(self) -> None:
        """Drop the queued jobs."""
        self._closed = True

"""Invariants of a simulated run, checked after every event of a process.

- Every version is the outer step of exactly the deltas that it lists: its weights are computed
  again here, from the frames that clients sent, by the formulas of `fsl_async.store.rules.outer`.
- A delta holds the work of its steps, and is merged at most once, in one lineage of versions.
- An acknowledged delta is on disk, and after any death of the process it is pending or merged.
- A delta is coded once, and is never measured from another base than the one that it names.
- Per client: acknowledged, refused and outstanding tokens are all tokens of its snapshots.
- All nodes at a version hold the same weights, to the bit.
- A fresh node never replaces a version that exists (there would be a second version 0).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import field, mutable

from fsl_async.learn.client.ports import Vector
from fsl_async.roles.machine import Effect, Event, Received, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.book.groups_state import Adoption
from fsl_async.store.book.records import VersionRecord
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.tools.sim.training import MANIFEST, TOLERANCE, Sent, VirtualTraining
from fsl_codecs import CodecSpec, decode, encode

COARSE = 0.6
"""By how much of its root mean square a value may differ at a step of 1."""


@mutable
class Lineage:
    """The versions of a run, made a second time.

    codec: of the outer change. sent: client, incarnation, sequence -> its training.
    """

    codec: CodecSpec
    manifest: Manifest = MANIFEST
    exact: bool = True
    """Whether clients code their deltas without loss."""
    reuse: int = 0
    """Versions that the base of a delta that is used again may be old."""
    weights: list[Vector] = field(factory=list)
    """The flat vector of each version, float32 (manifest.values,)."""
    tokens_of: list[int] = field(factory=list)
    """Tokens merged up to each version."""
    merged: dict[DeltaKey, int] = field(factory=dict)
    """Delta -> the version that merged it."""
    doubled: int = 0
    """Deltas that were merged again."""
    tokens: int = 0
    """Tokens of all merged deltas."""
    uses_again: int = 0
    """Uses of deltas that an earlier version had merged (`outer.aggregation = latest`)."""
    most_uses_again: int = 0
    """In one version."""
    works: dict[tuple[str, int], Sent] = field(factory=dict)
    """Client and incarnation -> its deltas, until they are merged."""
    adopts: Callable[[Adoption], Vector] | None = None
    """Gives what a version of global weights must hold, in a group."""
    _momentum: Vector = field(init=False)
    _residual: Vector = field(init=False)
    _values: dict[DeltaKey, Vector] = field(factory=dict)
    """The newest merged delta of each client, for rules that use it again."""

    def __attrs_post_init__(self) -> None:
        self._momentum = np.zeros(self.manifest.weights, np.float32)
        self._residual = np.zeros_like(self._momentum)

    @property
    def version(self) -> int:
        """The newest version; -1: none."""
        return len(self.weights) - 1

    def sent(self, key: DeltaKey) -> Vector | None:
        """Return a delta's values as its client coded them; None: no client has."""
        work = self.works.get((key.client, key.incarnation))
        frames = {} if work is None else work.frames.get(key.sequence, {})
        if len(frames) != self.manifest.chunks:
            return None
        return np.concatenate([decode(frames[index]) for index in sorted(frames)])

    def add(self, record: VersionRecord, held: Vector) -> list[str]:
        """Take the next version, of which the store holds these weights; return what is wrong."""
        if record.version != self.version + 1:
            return [f"version {record.version} follows {self.version}"]
        wrong = []
        if digest_of(held, weights=self.manifest.weights) != record.digest:
            wrong.append(f"version {record.version} holds other weights than its digest")
        if record.groups is not None and self.adopts is not None:
            wrong += self._check_adopted(record.groups, held)
        elif record.version:
            wrong += self._check(record, held)
        self.weights.append(held)
        self.tokens_of.append(record.tokens_total)
        for one in record.merged:
            self.merged[one.key] = record.version
            self.tokens += one.delta.tokens
        if record.tokens_total != self.tokens:
            wrong.append(
                f"version {record.version} has {record.tokens_total} tokens, its deltas"
                f" {self.tokens}"
            )
        return wrong

    def _check_adopted(self, adoption: Adoption, held: Vector) -> list[str]:
        assert self.adopts is not None, "it is a group"
        self._residual = np.zeros_like(self._residual)
        if np.array_equal(self.adopts(adoption), held):
            return []
        return [f"a version of global weights {adoption.round} is not those and the group's gain"]

    def _check(self, record: VersionRecord, held: Vector) -> list[str]:
        wrong, sums = [], {}
        for one in record.merged:
            found = self.sent(one.key)
            if one.key in self.merged:
                self.doubled += 1
                wrong.append(f"delta {one.key.text} is merged twice")
            if found is None:
                return [*wrong, f"delta {one.key.text} was never sent as it was merged"]
            work = self.works[one.key.client, one.key.incarnation]
            expected = work.expected.pop(one.key.sequence)
            error = float(np.abs(found[: self.manifest.weights] - expected).max())
            coded = 0.0 if self.exact else COARSE * work.largest
            if error > TOLERANCE * work.unit + coded:
                wrong.append(f"delta {one.key.text} does not hold the work of its steps")
            work.frames.pop(one.key.sequence, None)  # scalars have none
            sums[one.key] = found
        if record.rule == "latest":
            wrong += self._check_used_again(record)
        return wrong + self._compare(record, sums, held)

    def _compare(
        self, record: VersionRecord, values: Mapping[DeltaKey, Vector], held: Vector
    ) -> list[str]:
        """Make a version from the values of its deltas; return how the store's one differs."""
        wrong, made = [], self._made(record, values)
        weights, buffers = made[: self.manifest.weights], made[self.manifest.weights :]
        if not np.array_equal(weights, held[: self.manifest.weights]):
            wrong.append(f"version {record.version} holds other weights than its deltas give")
        if not np.allclose(buffers, held[self.manifest.weights :], rtol=1e-5):
            wrong.append(f"version {record.version} holds other buffers than its deltas give")
        return wrong

    def _check_used_again(self, record: VersionRecord) -> list[str]:
        """Check that a version uses again the newest delta of each other client, and no else."""
        sent = {one.key.client for one in record.merged}
        due = {
            key
            for key in self._values
            if key.client not in sent and record.version - 1 - key.base <= self.reuse
        }
        used = {one.key for one in record.reused}
        return [] if used == due else [f"in version {record.version} {used} are used again"]

    def _made(self, record: VersionRecord, values: Mapping[DeltaKey, Vector]) -> Vector:
        """Return what the version must be, and keep what the next one needs."""
        rate, coefficient = np.float32(record.learning_rate), np.float32(record.momentum)
        total, buffers = self._total(record, values)
        average = total * np.float32(record.scale)
        self._momentum = coefficient * self._momentum + average
        step = average + coefficient * self._momentum
        desired = -rate * step + self._residual
        sent = decode(encode(desired, self.codec))
        self._residual = desired - sent
        return np.concatenate([self.weights[-1][: self.manifest.weights] + sent, buffers])

    def _total(
        self, record: VersionRecord, values: Mapping[DeltaKey, Vector]
    ) -> tuple[Vector, Vector]:
        """Return the sum of weighted deltas, and the mean of the buffers that were sent."""
        size = self.manifest.weights
        if record.rule == "latest":
            return self._total_of_latest(record, values)
        total = np.zeros(size, np.float32)
        for one in record.merged:
            total = total + np.float32(one.weight) * values[one.key][:size]
        weights = [one.weight for one in record.merged]
        sent = [values[one.key][size:] for one in record.merged]
        return total, np.average(sent, axis=0, weights=weights)

    def _total_of_latest(
        self, record: VersionRecord, values: Mapping[DeltaKey, Vector]
    ) -> tuple[Vector, Vector]:
        """Sum up over clients the mean of their new deltas, or their newest one before."""
        self.uses_again += len(record.reused)
        self.most_uses_again = max(self.most_uses_again, len(record.reused))
        size, known = self.manifest.weights, {**self._values, **values}
        by_client: dict[str, list[MergedDelta]] = {}
        for one in sorted((*record.merged, *record.reused), key=lambda one: one.key):
            by_client.setdefault(one.key.client, []).append(one)
        total, buffers = np.zeros(size, np.float32), []
        for _, mine in sorted(by_client.items()):
            row = np.zeros_like(total)
            for one in mine:
                row = row + np.float32(one.weight / len(mine)) * known[one.key][:size]
            total = total + row
            buffers.append(np.mean([known[one.key][size:] for one in mine], axis=0))
        newest = {key.client: key for key in sorted(known, key=lambda key: key.order)}
        self._values = {key: known[key] for key in newest.values()}
        return total, np.mean(buffers, axis=0)


@mutable
class Invariants:
    """Events of one group of clients. violated: takes each violation that is found."""

    lineage: Lineage
    violated: Callable[[str], None]
    deltas_lost: int = 0
    tokens_unsent: int = 0
    """Tokens trained and not sent at the end of the run, by the clients present."""
    store: Store | None = None
    """The store of the running parameter server, or of the last one."""
    _offered: dict[DeltaKey, Delta] = field(factory=dict)
    _stored: dict[DeltaKey, None] = field(factory=dict)
    """Acknowledged by the parameter server, and in no version that is known."""
    _acknowledged: set[DeltaKey] = field(factory=set)
    _refused: set[DeltaKey] = field(factory=set)
    _settled: Counter[tuple[str, int]] = field(factory=Counter)
    """Tokens acknowledged and refused by incarnation; its successor may receive the outcome."""

    # --- at a parameter server ---

    def recovered(self, store: Store, found: ev.Recovered) -> None:
        """Check what a new process has found on its disk."""
        self.store = store
        if found.version < self.lineage.version:
            text = f"version {self.lineage.version} is lost, and {found.version} is recovered"
            self.violated(text)
        self._check_new_versions()
        there = {stored.key for stored in found.pending} | found.settled.keys()
        for key in [key for key in self._stored if key not in there]:
            self.violated(f"acknowledged delta {key.text} is lost")
            self.deltas_lost += 1

    def after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Effect]
    ) -> None:
        """Check what an event of the parameter server may have touched."""
        if isinstance(event, ev.VersionCommitted):
            self._check_new_versions()
        if machine.version > self.lineage.version:
            text = f"the server believes in version {machine.version}, which is not made"
            self.violated(text)
        assert self.store is not None, "a process that handles events has a store"
        for effect in effects:
            if isinstance(effect, Send) and effect.message.tag == "accepted/1":
                key: DeltaKey = effect.message.key  # type: ignore[attr-defined]
                if self.store.known(key) is None and key not in self.lineage.merged:
                    self.violated(f"acknowledged delta {key.text} is not durable")
                if key not in self.lineage.merged:
                    self._stored[key] = None

    def _check_new_versions(self) -> None:
        store = self.store
        assert store is not None, "a version is of a store"
        for record in store.records:
            if record.version > self.lineage.version:
                for text in self.lineage.add(record, weights_in(store, record.version)):
                    self.violated(text)
                for one in record.merged:
                    self._stored.pop(one.key, None)

    def run_ended(self, ended: Mapping[str, VirtualTraining], names: Sequence[str]) -> None:
        """Check after an orderly end that every client has the last version, with all its work."""
        last = self.lineage.version
        for name in names:
            training = ended.get(name)
            if training is None:
                self.violated(f"{name} did not end with its run")
            elif training.exchange.version != last:
                text = f"{name} ended with version {training.exchange.version}, not {last}"
                self.violated(text)
            else:
                self.tokens_unsent += training.unsent_tokens
        assert self.store is not None, "a run that ended has a store"
        for key in self._stored:
            if self.store.known(key) != "quarantined":
                self.violated(f"acknowledged delta {key.text} is not in the last version")

    # --- at a client ---

    def after_client(
        self,
        machine: ClientMachine,
        training: VirtualTraining,
        event: Event,
        effects: list[Effect],
    ) -> None:
        """Check what an event of a client may have touched."""
        for effect in effects:
            if isinstance(effect, do.OfferDelta):
                self._offered_again(effect.delta)
        match event:
            case ev.Welcomed():
                self.lineage.works[machine.name, machine.incarnation] = training.sent
            case Received(_, msg.Accepted(key)):
                self._taken(machine, key)
            case Received(_, msg.Declined(key, code)) if code != "later" and key in self._offered:
                if key not in self._refused:
                    self._refused.add(key)
                    self._settled[_owner(key)] += self._offered[key].tokens
            case ev.BaseReplaced(version) | ev.Rebased(version) if (
                version or machine.base.version == 0  # else another client's were published
            ):
                training.exchange.use_base(
                    lambda vector, version: self._holds(machine.name, vector, version)
                )
        if event.topic in {msg.Accepted, msg.Declined, ev.Snapshotted}:
            self._balance(machine, training)

    def _taken(self, machine: ClientMachine, key: DeltaKey) -> None:
        offered = self._offered.get(key)
        if key not in self._stored and key not in self.lineage.merged:
            self.violated(f"{machine.name} received that {key.text} is durable; it is not")
        elif offered is None:
            self.violated(f"{machine.name} never trained delta {key.text}")
        elif key not in self._acknowledged:
            self._acknowledged.add(key)
            self._settled[_owner(key)] += offered.tokens

    def _offered_again(self, delta: Delta) -> None:
        key = delta.key
        before = self._offered.setdefault(key, delta)
        if before is delta:
            if key.base <= self.lineage.version and delta.base_digest != self._digest(key.base):
                self.violated(f"delta {key.text} names a base of another lineage")
        elif before != delta:
            self.violated(f"delta {key.text} was recomputed")

    def _digest(self, version: int) -> str:
        lineage = self.lineage
        return digest_of(lineage.weights[version], weights=lineage.manifest.weights)

    def _holds(self, name: str, held: Vector, version: int) -> None:
        if version > self.lineage.version:
            self.violated(f"{name} holds version {version}, which does not exist")
        elif not np.array_equal(held, self.lineage.weights[version]):
            self.violated(f"{name} holds something else than version {version}")

    def _balance(self, machine: ClientMachine, training: VirtualTraining) -> None:
        outstanding = machine.delta.tokens if machine.delta is not None else 0
        sent = self._settled[machine.name, machine.incarnation] + outstanding
        if sent != training.sent_tokens:
            self.violated(
                f"{machine.name} snapshotted {training.sent_tokens} tokens, "
                f"{sent} are accounted for"
            )


def _owner(key: DeltaKey) -> tuple[str, int]:
    return key.client, key.incarnation


def weights_in(store: Store, version: int) -> Vector:
    """Return a version's weights as a store sends them to a new client."""
    frames = [store.read_full(version, index) for index in range(store.manifest.chunks)]
    return np.concatenate([decode(frame) for frame in frames if frame is not None])

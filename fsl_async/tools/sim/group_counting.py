"""Groups replaced by counting: what a parameter server in a roster has on its disk.

Global weights are a number too: the tokens in decided rounds, above those of version 0. A reduction
adds what the groups gained instead of averaging it. So a token that is lost or counted twice gives
a wrong number. What the ledger says of global rounds is the production code's `RingBook`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attrs import asdict, evolve, field, frozen, mutable

from fsl_async.roles.ring.events import Cut, Decision, RingRecovered
from fsl_async.roles.sync.events import Recovered
from fsl_async.store.errors import StoreError
from fsl_async.store.manifest import Manifest
from fsl_async.store.records import Committed
from fsl_async.store.ring_book import RingBook
from fsl_async.tools.sim.counting import CHUNKS, MANIFEST, CountingStore, Disk, Model, digest_of
from fsl_codecs import CodecSpec

RUN = "5" * 32
"""All groups of a simulation are of one run."""


@frozen
class Weights:
    """The content of a file of weights: a number and its digest."""

    total: int
    digest: str


@mutable
class GroupDisk(Disk):
    """What a parameter server in a roster has made durable."""

    book: RingBook = field(factory=RingBook)
    cut: Weights | None = None
    results: dict[tuple[int, int], Weights] = field(factory=dict)
    """(round, attempt) -> global weights: decided, received, or reduced and not decided."""
    reduced: dict[int, Weights] = field(factory=dict)
    """Attempt -> what a helper wrote, until it is checked and renamed."""
    adopted_at: set[int] = field(factory=set)
    """Versions that were made of global weights."""


@frozen
class RingHooks:
    """How a store's jobs for global rounds meet the world.

    fails: whether the disk refuses this one. written: takes a description of each write. decided:
    takes a decision, and its weights, when its line is in the ledger. begun: takes G_0.
    """

    fails: Callable[[], bool]
    written: Callable[[str], None]
    begun: Callable[[Weights], None]
    decided: Callable[[Decision, dict[str, tuple[int, int]], Weights], None]


class CountingRing:
    """`RingStore` with numbers. Every method is one job of the worker."""

    def __init__(self, disk: GroupDisk, hooks: RingHooks) -> None:
        self.disk, self._hooks = disk, hooks
        self._offered_model: Manifest | None = None
        self._receiving: tuple[int, int, str, list[bytes]] | None = None

    def _may_fail(self, doing: str) -> None:
        if self._hooks.fails():
            raise StoreError(f"{doing}: the simulated disk is full")

    @property
    def model(self) -> Manifest | None:
        """The model, once it is known."""
        return MANIFEST if self.disk.models else self._offered_model

    @property
    def state(self) -> RingRecovered:
        """The state for the machine."""
        return self.disk.book.recovered(self.disk.tokens_merged)

    def open(self, *, coordinates: bool = False) -> RingRecovered:
        """Remove what is not needed; return the state."""
        self.clean()
        self.disk.reduced.clear()
        return self.state

    def clean(self) -> None:
        """Remove the files that no decision and no cut needs."""
        book, disk = self.disk.book, self.disk
        keep = {(one.round, one.attempt) for one in (book.adopted, book.decided) if one}
        next_round = book.adopted_round + 1
        disk.results = {
            at: one for at, one in disk.results.items() if at in keep or at[0] == next_round
        }
        if book.cut is None:
            disk.cut = None

    def begin(self) -> Decision:
        """Make the newest version G_0."""
        disk = self.disk
        if disk.book.adopted is None:
            newest = disk.models[-1]
            weights = Weights(newest.total, newest.digest)
            disk.results[0, 0] = weights
            facts = {"version": newest.version, "digest": newest.digest}
            disk.book.begun({**facts, "tokens": disk.tokens_merged, "run": RUN})
            self._hooks.begun(weights)
        assert disk.book.adopted is not None
        return disk.book.adopted

    def take_cut(self, number: int) -> Cut:
        """Make the newest version the cut of a round; the same one again, if there is one."""
        disk, book = self.disk, self.disk.book
        if book.adopted_round != number:
            raise StoreError(f"the group is not in global round {number}")
        if book.cut is None:
            self._may_fail("no cut")
            newest = disk.models[-1]
            disk.cut = Weights(newest.total, newest.digest)
            cut = Cut(number, newest.version, newest.digest, book.reference, disk.tokens_merged)
            book.offered(asdict(cut))
            self._hooks.written("cut")
        assert book.cut is not None
        return book.cut

    def keep_attempt(self, number: int, attempt: int) -> None:
        """Record that this number of an attempt is used."""
        self._may_fail("no attempt")
        self.disk.book.attempted({"attempt": attempt})
        self._hooks.written("attempt")

    def keep_decision(
        self, number: int, attempt: int, digest: str, contributors: dict[str, tuple[int, int]]
    ) -> None:
        """Record a decision."""
        self._may_fail("no decision")
        if not self.has(number, attempt, digest):
            raise StoreError(f"the result of attempt {attempt} is not here any more")
        fact = {"round": number, "attempt": attempt, "digest": digest, "run": RUN}
        self.disk.book.decide({**fact, "contributors": contributors})
        made = Decision(number, attempt, digest, RUN)
        self._hooks.decided(made, contributors, self.disk.results[number, attempt])
        self._hooks.written("decision")

    def begin_result(self, attempt: int) -> dict[str, Any]:
        """Return what a reduction reads and writes. Results of attempts before are removed."""
        disk, held = self.disk, self.disk.book
        if held.adopted is None or held.cut is None or disk.cut is None:
            raise StoreError("there is no cut to reduce")
        at = held.adopted.round, held.adopted.attempt
        disk.results = {at: disk.results[at]}
        return {
            "base": disk.results[at], "cut": disk.cut, "out": disk.reduced,
            "skip": 0, "values": MANIFEST.values,
        }  # fmt: skip

    def finish_result(self, attempt: int, spec: CodecSpec) -> str:
        """Keep the result of an attempt; return its digest. No update is coded here."""
        disk = self.disk
        self._may_fail("no result")
        weights = disk.reduced.pop(attempt, None)
        if weights is None or disk.book.adopted is None:
            raise StoreError(f"the result of attempt {attempt} is no weights of this model")
        disk.results[disk.book.adopted.round + 1, attempt] = weights
        self._hooks.written("result")
        return weights.digest

    def has(self, number: int, attempt: int, digest: str) -> bool:
        """Whether these global weights are here."""
        held = self.disk.results.get((number, attempt))
        return held is not None and held.digest == digest

    def use_model(self, manifest: Manifest) -> None:
        """Take the model of global weights that will arrive."""
        self._offered_model = manifest

    def receive(self, number: int, attempt: int, digest: str) -> None:
        """Begin to receive global weights."""
        self._receiving = number, attempt, digest, []

    def write_chunk(self, index: int, frame: bytes) -> None:
        """Add a chunk; a repeated one is ignored."""
        if self._receiving is not None and index == len(self._receiving[3]):
            self._receiving[3].append(bytes(frame))

    def finish_receiving(self) -> None:
        """Keep the global weights that arrived."""
        coming, self._receiving = self._receiving, None
        if coming is None:
            raise StoreError("no global weights are arriving")
        self._may_fail("no global weights")
        number, attempt, digest, frames = coming
        assert len(frames) == CHUNKS, "global weights are complete"
        assert len(set(frames)) == 1, "chunks of one version of global weights"
        weights = Weights(*json.loads(frames[0]))
        if weights.digest != digest:
            raise StoreError("global weights arrived with another digest than decided")
        self.disk.results[number, attempt] = weights
        self._hooks.written("global weights")

    def read_chunk(self, index: int, decided: Decision) -> bytes | None:
        """Return a chunk of decided global weights; None: not here."""
        held = self.disk.results.get((decided.round, decided.attempt))
        if self.disk.book.decided != decided or held is None:
            return None
        return json.dumps([held.total, held.digest]).encode()


class GroupCountingStore(CountingStore):
    """The store of a parameter server in a roster."""

    disk: GroupDisk

    def __init__(self, disk: GroupDisk, hooks: RingHooks, *more: Any) -> None:
        super().__init__(disk, *more)
        self.ring = CountingRing(disk, hooks)
        self._hooks = hooks

    @property
    def version(self) -> int:
        """The newest version; -1: none."""
        return self.disk.models[-1].version if self.disk.models else -1

    def recover(self) -> Recovered:
        """Return what a new process recovers."""
        found, book = super().recover(), self.disk.book
        adopted = book.adopted
        is_exact = adopted is not None and found.digests.get(book.version) == adopted.digest
        return evolve(
            found,
            global_version=book.version if is_exact else -1,
            global_versions=book.versions,
            newest_global=tuple(book.newest),
        )

    def has_update(self, version: int) -> bool:
        """Whether the update to a version is kept; one of global weights has none."""
        return version not in self.disk.adopted_at and super().has_update(version)

    def adopt_global(self, decision: Decision, *, counted: bool, keeps_momentum: bool) -> Committed:
        """Make the next version of global weights; the cases are those of `RingStore`."""
        if self._hooks.fails():
            raise StoreError("no version of global weights: the simulated disk is full")
        disk, book = self.disk, self.disk.book
        weights, digest = disk.results[decision.round, decision.attempt], decision.digest
        assert weights.digest == digest, "what was decided is adopted"
        version, total = self.version + 1, weights.total
        last = disk.models[-1] if disk.models else Model()
        since = self._reference(last, counted=counted)
        if since is not None:
            total += last.total - since.total
            digest = digest_of(last.digest, version, total)
        disk.models.append(Model(version, total, digest))
        ring = {**asdict(decision), "counted": counted}
        book.adopt(version, ring, disk.tokens_merged)
        disk.adopted_at.add(version)
        disk.version_at, disk.whole = self._clock(), version
        disk.checkpoints += 1
        disk.spool.clear()
        self._prune(version)
        self.ring.clean()
        self._hooks.written("version of global weights")
        made_of = "global" if digest == weights.digest else "late"
        return Committed(version, digest, 0, CHUNKS, 0.0, made_of=made_of)

    def _reference(self, last: Model, *, counted: bool) -> Weights | None:
        """The weights from which the group's gain counts; None: it gained nothing."""
        disk, held = self.disk, self.disk.book
        if held.adopted is None:
            return None
        if counted:
            assert held.cut is not None, "there is a cut that was counted"
            return None if held.cut.version == last.version else disk.cut
        if held.version == last.version and last.digest == held.adopted.digest:
            return None
        return disk.results[held.adopted.round, held.adopted.attempt]

"""Merging: the deltas of a round, their average, and the version made from it."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from attrs import evolve, frozen

from fsl_async.roles.sync.agreement import mean_cosine
from fsl_async.roles.sync.delta import Delta, MergedDelta
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.accumulator import Accumulator
from fsl_async.store.adapter_aggregator import LARGEST_PRODUCT, AdapterAggregator
from fsl_async.store.averages import averaged, full_averaged, stepped
from fsl_async.store.checkpoint import UPDATE, VersionWriter
from fsl_async.store.delta_kind import Seeds
from fsl_async.store.errors import NotFinite, StoreError, disk
from fsl_async.store.outer import mean_share
from fsl_async.store.records import VersionRecord, way_out
from fsl_async.store.robust_aggregator import RobustAggregator
from fsl_async.store.seed_step import SeedStep, frame_of, is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.checkpoint import Checkpoint
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.facts import Facts
    from fsl_async.store.kept_versions import KeptVersions
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.memory import Allocate
    from fsl_async.store.newest import Newest
    from fsl_async.store.records import StoreSettings
    from fsl_async.store.recovery import RunDirectory

    Chunks = Iterable[NDArray[Any]]

MOST_HELD_BYTES_PER_VALUE = 1
"""Coded changes up to this size stay in memory while clients fetch them; others are read again."""

_LARGEST_WEIGHT = float(np.finfo(np.float32).max)


def is_weight(weight: float | None) -> TypeGuard[float]:
    """Whether `weight` is valid for a delta in the sum."""
    return weight is not None and 0.0 <= weight <= _LARGEST_WEIGHT


AT_START = RunPosition()


@frozen
class Average:
    """The average of a round. Iterating yields its chunks, float32, in flat order.

    Each chunk is valid until the next. It may be iterated several times until the version is made.
    Where the rule keeps what it owes, they have two rows (fsl_async.store.adapter_aggregator); for
    full weights and scalars see fsl_async.store.averages.
    """

    version: int
    merged: tuple[MergedDelta, ...]
    """As recorded: a delta that the aggregation rule left out has the weight 0."""
    scale: float
    position: RunPosition
    """Where the run is once the version is made."""
    _chunks: Callable[[], Chunks]
    _product_norms: Callable[[], Mapping[str, float]] = dict
    reused: tuple[MergedDelta, ...] = ()
    """Merged by earlier versions, and a part of it again; as recorded."""
    seeds: SeedStep | None = None
    """The steps of a version of zeroth order."""
    norm: float = 0.0
    """Their norm as a vector of the model's size."""

    @property
    def recorded(self) -> tuple[MergedDelta, ...]:
        """`merged`, with the norms of products that came out while the chunks were made."""
        norms = self._product_norms()
        return tuple(
            evolve(one, product_norm=norms.get(one.key.client, 0.0)) if one.weight else one
            for one in self.merged
        )

    @property
    def mean_steps(self) -> float:
        """Steps of a client in the round, in the mean; several deltas of one are its work."""
        clients = {one.key.client for one in self.merged}
        return sum(one.delta.steps for one in self.merged) / max(1, len(clients))

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter(self._chunks())


class Merging:
    """The current round of one open run, and the step to the next version."""

    def __init__(
        self,
        files: Files,
        run: RunDirectory,
        facts: Facts,
        kept: KeptVersions,
        newest: Newest,
        *,
        pool: ChunkPool,
        settings: StoreSettings,
        allocate: Allocate,
        full_fetch: Callable[[], bool],
    ) -> None:
        """full_fetch: whether a client fetches the newest version in full."""
        self._files = files
        self._run = run
        self._facts = facts
        self._kept = kept
        self._pool = pool
        self._settings = settings
        self._newest = newest
        self._allocate = allocate
        self._full_fetch = full_fetch
        self._sum: Accumulator | RobustAggregator | AdapterAggregator | None = None

    @property
    def _manifest(self) -> Manifest:
        assert self._run.manifest is not None, "there is a version"
        return self._run.manifest

    @property
    def sum(self) -> Accumulator | RobustAggregator | AdapterAggregator:
        """The sum of the round's deltas; created when it is first used."""
        rule = self._settings.rule
        spool = self._run.spool
        kind = self._settings.kind
        if self._sum is None and self._settings.product_rule is not None:
            self._sum = AdapterAggregator(self._manifest, spool, self._pool, self._settings)
        elif self._sum is None and rule.by_rows:
            self._sum = RobustAggregator(self._manifest, spool, self._pool, rule, kind)
        elif self._sum is None:
            self._sum = Accumulator(self._manifest, spool, self._pool, kind, self._allocate)
        return self._sum

    def needs_file(self, key: DeltaKey) -> bool:
        """Whether the next version cannot be made without a pending delta's file."""
        return not (isinstance(self._sum, Accumulator) and key in self._sum.weights)

    def arriving(self, key: DeltaKey, weight: float | None, index: int, content: Any) -> None:
        """Add a frame of an incomplete delta if possible (`Accumulator.add_arriving`)."""
        if is_weight(weight) and (round_sum := self._sum_of_all_but(0)):
            round_sum.add_arriving(key, weight, index, content)

    def arrived(self, key: DeltaKey, weight: float | None) -> None:
        """Add a delta that has just become pending, so that the commit has less to read.

        weight: its probable one. The commit has the last word on what is in the sum.
        """
        if not (is_weight(weight) and self._has_part(key)):
            return
        with suppress(StoreError, MemoryError):  # the commit tries again, and reports what is wrong
            if round_sum := self._sum_of_all_but(1):
                round_sum.add(key, weight)

    def _sum_of_all_but(self, count: int) -> Accumulator | None:
        """The sum, if it has all pending deltas but the newest `count`: another one is the next."""
        found = self.sum
        pending = len(self._facts.book.pending) - count
        return found if isinstance(found, Accumulator) and len(found.weights) == pending else None

    def _has_part(self, key: DeltaKey) -> bool:
        """Whether a delta can count in the next version.

        Scalars of an older round cannot: they are along other directions. They enter a version
        without weight.
        """
        return not self._settings.kind.is_scalars or key.base == self._facts.book.version

    def drop(self, key: DeltaKey) -> None:
        """Remove a delta, or its frames, from the sum."""
        if isinstance(self._sum, Accumulator):
            self._sum.remove(key)

    def commit(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition,
        reused: Sequence[MergedDelta],
    ) -> Checkpoint:
        """Make the next version of exactly `merged`, which ends the round.

        Its average is scale * sum of weight * delta, or the aggregation rule's result. reused: see
        `Average`. Raises as `advance`.
        """
        self._check(version, merged, scale)
        again = self._checked_again(version, merged, reused)
        self.sum.assemble([one for one in merged if self._has_part(one.key)])
        return self.advance(self._average(version, merged, scale, position, again))

    def _average(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition,
        again: tuple[MergedDelta, ...],
    ) -> Average:
        """Return the next version's average. again: what is used again, as recorded."""
        round_sum = self.sum
        chunks: Callable[[], Chunks] = tuple
        norms: Callable[[], Mapping[str, float]] = dict
        book = self._facts.book
        if (
            len(round_sum.weights) < len(merged)
            and len({key.client for key in round_sum.weights}) < self._settings.rule.least
        ):
            used = set()
            mean: NDArray[Any] = np.zeros(sum(self._settings.kind.parts(self._manifest)))
        elif isinstance(round_sum, AdapterAggregator):
            vectors = self._newest.vectors
            facts = {key: book.pending[key].delta.facts for key in round_sum.weights}
            used = {key for keys in round_sum.fresh(version) for key in keys}
            clips = {one.key: one.clip for one in merged}
            chunks = lambda: round_sum.averages(vectors, version, facts, clips)  # noqa: E731
            norms = lambda: round_sum.product_norms  # noqa: E731
        elif self._settings.rule.reuses:
            used = set(round_sum.weights)
            chunks = lambda: self._of_all(merged, again, scale)  # noqa: E731
        elif isinstance(round_sum, RobustAggregator):
            with disk("cannot read the deltas of the round"):
                chosen = round_sum.chosen()
            used = {key for keys in chosen for key in keys}
            chunks = lambda: round_sum.averages(chosen, map(self._recorded, merged))  # noqa: E731
            if self._settings.kind.is_scalars:
                (mean,) = chunks()
        else:
            used = set(round_sum.weights)
            kind = self._settings.kind
            weight = math.fsum(round_sum.weights.values())
            if kind.is_full:
                vectors = self._newest.vectors
                chunks = lambda: full_averaged(vectors, round_sum.chunks(), scale, weight)  # noqa: E731
            elif kind.is_scalars:
                (mean,) = (scale * total for total in round_sum.chunks())
            else:
                chunks = lambda: averaged(  # noqa: E731
                    self._manifest, round_sum.chunks(), scale, weight
                )
        seeds, norm = None, 0.0
        if isinstance(self._settings.kind, Seeds):
            directions = self._settings.kind.directions
            seeds, norm = (
                directions.step(version - 1, mean),
                math.sqrt(directions.squared_norm(self._manifest.values, mean)),
            )
            if not is_finite(seeds):
                raise NotFinite(f"the steps of version {version} are not finite; {self._way_out()}")
            chunks = partial(stepped, self._manifest, self._newest.vectors, seeds, self._pool)
        return Average(
            version,
            tuple(
                MergedDelta(
                    self._recorded(one).delta,
                    one.staleness,
                    one.weight if one.key in used else 0.0,
                    book.pending[one.key].norm,
                    clip=one.clip,
                )
                for one in merged
            ),
            scale,
            position,
            chunks,
            norms,
            again,
            seeds,
            norm,
        )

    def _of_all(
        self, merged: Sequence[MergedDelta], reused: Sequence[MergedDelta], scale: float
    ) -> Chunks:
        """The average of new and old deltas, for a rule that uses old ones again."""
        settings, spool = self._settings, self._run.spool
        rows = RobustAggregator(self._manifest, spool, self._pool, settings.rule, settings.kind)
        return rows.averages_of_all(merged, reused, scale)

    def _recorded(self, one: MergedDelta) -> MergedDelta:
        """A delta of the round as versions record it: with metrics, where the rule reads them."""
        metrics = {}
        if self._settings.rule.reads_metrics:
            metrics = self._facts.book.pending[one.key].delta.metrics
        work = Delta(one.key, "", one.delta.tokens, one.delta.steps, metrics=metrics)
        return evolve(one, delta=work)

    def _check(self, version: int, merged: Sequence[MergedDelta], scale: float) -> None:
        book = self._facts.book
        if version != book.version + 1:
            raise StoreError(f"the run is at version {book.version}; {version} cannot be next")
        if not merged or len({one.key for one in merged}) != len(merged):
            raise StoreError(f"version {version} is to merge no delta, or one of them twice")
        if not math.isfinite(scale):
            raise StoreError(f"version {version} has the scale {scale}; it must be finite")
        for one in merged:
            if not (0.0 < one.clip <= 1.0 and is_weight(one.weight)):
                raise StoreError(
                    f"delta {one.key.text} has the weight {one.weight} and is clipped by {one.clip}"
                )
            if one.key not in book.pending:
                raise StoreError(f"delta {one.key.text} is not pending, so it cannot be merged")
            tokens = book.pending[one.key].delta.tokens
            if tokens < one.delta.tokens:
                raise StoreError(
                    f"delta {one.key.text} was accepted with {tokens} tokens, not "
                    f"{one.delta.tokens}"
                )

    def _checked_again(
        self, version: int, merged: Sequence[MergedDelta], reused: Sequence[MergedDelta]
    ) -> tuple[MergedDelta, ...]:
        """Return `reused` as it is recorded. StoreError: a delta may not be used again."""
        latest = self._facts.book.latest.at(version - 1) if reused else {}
        clients = {one.key.client for one in merged}
        found = []
        for one in reused:
            held = latest.get(one.key.client)
            if held is None or held.stored.key != one.key or one.key.client in clients:
                raise StoreError(
                    f"delta {one.key.text} cannot be used again in version {version}: it is too"
                    " old, or not its client's newest one"
                )
            if not is_weight(one.weight):
                raise StoreError(f"delta {one.key.text} has the weight {one.weight}")
            clients.add(one.key.client)
            delta = held.stored.delta
            work = Delta(one.key, "", delta.tokens, delta.steps)
            found.append(MergedDelta(work, one.staleness, one.weight, held.stored.norm))
        return tuple(found)

    def advance(self, average: Average) -> Checkpoint:
        """Make the version of an average, which ends the round.

        StoreError: version and round are as before. DeltaDamaged: a delta cannot be read back.
        """
        self.restore(average.version - 1)
        try:
            checkpoint = self._make(average)
        except BaseException as error:
            self.restore(average.version - 1)
            if isinstance(error, NotFinite):
                raise NotFinite(f"{error}; {self._way_out()}") from error
            raise
        self.sum.clear()
        return checkpoint

    def too_large(self, client: str, norm: float) -> str | None:
        """Why products of a delta of this norm may leave fp32; None: they do not. StoreError.

        Deltas of a client in one round add up, so its pending ones count.
        """
        if self._settings.product_rule is None:
            return None
        book = self._facts.book
        self.restore(book.version)
        assert isinstance(self.sum, AdapterAggregator), "it merges products"
        moved = norm + sum(one.norm for key, one in book.pending.items() if key.client == client)
        bound, held, name = self.sum.largest_product(self._newest.vectors, moved)
        limit = f"above {LARGEST_PRODUCT:g} in {name!r}"
        if held > LARGEST_PRODUCT:
            return f"products of version {book.version} itself are {limit}; {self._way_out()}"
        text = f"its norm of {norm:.3g} lets products grow {limit}: its client has diverged"
        return text if bound > LARGEST_PRODUCT else None

    def _way_out(self) -> str:
        run_dir = str(self._run.checkpoints.directory.parent)
        return way_out(self._kept.records, [*self._facts.book.pending.values()], run_dir)

    def restore(self, version: int) -> None:
        """Take back what a failed commit did to the vectors. StoreError: try again."""
        if self._newest.vectors.version != version:
            with disk(f"cannot read version {version} again"):
                self._newest.recover()

    def _make(self, average: Average) -> Checkpoint:
        """Write a version; after an error nothing of it is left on disk."""
        run, manifest, version = self._run, self._manifest, average.version
        settings, current = self._settings, self._kept.get(version - 1).record
        step = settings.outer.numbers(version, average.position.fade, average.mean_steps)
        # Factors of several versions have no mean: each version has a basis of its own.
        has_mean = not average.position.is_planned and settings.product_rule is None
        share = mean_share(version) if has_mean and not settings.sets_weights else 0.0
        held: list[bytes] = []
        most_held = MOST_HELD_BYTES_PER_VALUE * manifest.values
        with (
            disk(f"cannot write version {version}"),
            VersionWriter(self._files, run.checkpoints, version, manifest) as writer,
        ):
            self._kept.hold_update(-1, ())
            update = None if settings.sets_weights else writer.frames(UPDATE)

            def take(frame: bytes) -> None:
                assert update is not None, "there is a coded change"
                update.append(frame)
                if update.bytes <= most_held:
                    held.append(frame)
                else:
                    held.clear()

            self._newest.make_way(version, must_finish=self._full_fetch())
            change = self._newest.vectors.advance(
                version, average, step, share, take=take, sets=settings.sets_weights
            )
            norms = change.update_norm, change.average_norm
            steps = average.seeds
            if steps is not None:
                norms = average.norm, average.norm
            stored = writer.seal(self._pool)
            self._facts.begin_version(version)
            record = VersionRecord(
                version=version,
                digest=change.digest,
                parent=current.digest,
                generation=self._facts.book.generation,
                fingerprint=manifest.fingerprint,
                merged=average.recorded,
                scale=average.scale,
                tokens_total=self._facts.book.tokens_total
                + sum(one.delta.tokens for one in average.merged),
                update_bytes=change.update_bytes
                if steps is None
                else len(frame_of([steps]) or b""),
                update_chunks=manifest.chunks if steps is None else 1,
                update_norm=norms[0],
                average_norm=norms[1],
                cosine=self._cosine(average, norms[1]),
                mean_share=share,
                learning_rate=step.learning_rate,
                momentum=step.momentum,
                progress=average.position.known_progress,
                rule=settings.rule_name,
                seeds=steps,
                reused=average.reused,
            )
            checkpoint = writer.publish(record, stored)
        self._kept.hold_update(version, held)
        return checkpoint

    def _cosine(self, average: Average, norm: float) -> float | None:
        """How far the merged deltas agree; None where the average is not their weighted sum."""
        if self._settings.kind.is_full or self._settings.leaves_out:
            return None
        return mean_cosine(average.merged, average.scale, norm)

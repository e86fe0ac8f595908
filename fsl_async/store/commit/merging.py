"""Merging: the deltas of a round, their average, and the version made from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from attrs import asdict, define, evolve, field

from fsl_async.roles.sync.delta import Delta, MergedDelta, mean_cosine
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.book.records import VersionRecord, way_out
from fsl_async.store.deltas.delta_kind import Masked
from fsl_async.store.deltas.seed_step import frame_of
from fsl_async.store.errors import NotFinite, StoreError, disk
from fsl_async.store.merge.merge import Round, SecureMerge, SumMerge
from fsl_async.store.merge.merge_channel import ChannelMerge, KeptMerge
from fsl_async.store.merge.merge_products import ProductsMerge
from fsl_async.store.merge.merge_rows import RowsMerge
from fsl_async.store.merge.merge_upstream import UpstreamMerge
from fsl_async.store.rules.outer import mean_share
from fsl_async.store.vectors.vectors import Change
from fsl_async.store.versions.checkpoint import UPDATE, VersionWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsl_async.store.commit.newest import Newest
    from fsl_async.store.disk.chunk_files import FrameWriter
    from fsl_async.store.merge.merge import Average, Merge
    from fsl_async.store.recovery.run_directory import RunDirectory
    from fsl_async.store.versions.checkpoint import Checkpoint

MOST_HELD_BYTES_PER_VALUE = 1
"""Coded changes up to this size stay in memory while clients fetch them; others are read again."""

_LARGEST_WEIGHT = float(np.finfo(np.float32).max)


def is_weight(weight: float | None) -> TypeGuard[float]:
    """Whether `weight` is valid for a delta in the sum."""
    return weight is not None and 0.0 <= weight <= _LARGEST_WEIGHT


AT_START = RunPosition()
LARGEST_NORM = 1e20
"""Largest norm of a delta.

Times the most tokens that a delta may report, summed over thousands of deltas, it is far inside
fp32.
"""


class Merging:
    """The current round of one open run, and the step to the next version."""

    def __init__(
        self, run: RunDirectory, newest: Newest, merge: Merge, full_fetch: Callable[[], bool]
    ) -> None:
        """full_fetch: whether a client fetches the newest version in full."""
        self._run = run
        self._book = run.book
        self._newest = newest
        self._merge = merge
        self._settings = run.settings
        self._full_fetch = full_fetch

    def commit(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition,
        reused: Sequence[MergedDelta],
    ) -> Checkpoint:
        """Make the next version of exactly `merged`, which ends the round.

        Its average is scale * sum of weight * delta, or the aggregation rule's result. position:
        where the run is then. reused: merged by earlier versions, and a part of this one again.

        StoreError: version and round are as before. DeltaDamaged: a delta cannot be read back.
        """
        self._check(version, merged, scale)
        again = self._checked_again(version, merged, reused)
        recorded = tuple(map(self._recorded, merged))
        self.restore(version - 1)
        try:
            made = Round(version, recorded, scale, again, self._book.pending)
            if isinstance(self._merge, KeptMerge):
                made = self._received(self._merge, made)
            return self._make(made, position)
        except BaseException as error:
            self.restore(version - 1)
            if isinstance(error, NotFinite):
                raise NotFinite(f"{error}; {self._way_out()}") from error
            raise

    def _received(self, merge: KeptMerge, made: Round) -> Round:
        """Return a round with the weights of the deltas that were delivered."""
        with disk("cannot keep the sum"):
            received = merge.receive(made, self._book.received, self._newest.vectors)
            if received != self._book.received:
                self._run.record("received", asdict(received))
        lost = (one for one in made.merged if one.key.client not in received.senders)
        weightless = {one.key: evolve(one, weight=0.0) for one in lost}
        return evolve(made, merged=[weightless.get(one.key, one) for one in made.merged])

    def _recorded(self, one: MergedDelta) -> MergedDelta:
        """Return a delta as versions record it."""
        norm = self._book.pending[one.key].norm
        work = Delta(one.key, "", one.delta.tokens, one.delta.steps)
        return MergedDelta(work, one.staleness, one.weight, norm, clip=one.clip, score=one.score)

    def _check(self, version: int, merged: Sequence[MergedDelta], scale: float) -> None:
        book = self._book
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
        latest = self._book.latest.at(version - 1) if reused else {}
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

    def too_large(self, client: str, norm: float) -> str | None:
        """Return why a delta of this norm must not be merged; None: it may. StoreError.

        Deltas of a client in one round add up, so its pending ones count.
        """
        if not math.isfinite(norm):
            return "it holds NaN or infinity"
        if norm > LARGEST_NORM:
            return f"its norm of {norm:.3g} is above {LARGEST_NORM:g}: its client has diverged"
        book = self._book
        self.restore(book.version)
        moved = norm + sum(one.norm for key, one in book.pending.items() if key.client == client)
        found = self._merge.too_large(moved, self._newest.vectors)
        if found is None:
            return None
        limit, is_old = found
        if is_old:
            return f"products of version {book.version} itself are {limit}; {self._way_out()}"
        return f"its norm of {norm:.3g} lets products grow {limit}: its client has diverged"

    def _way_out(self) -> str:
        run_dir = str(self._run.path)
        return way_out(self._run.kept.records, [*self._book.pending.values()], run_dir)

    def restore(self, version: int) -> None:
        """Take back what a failed commit did to the vectors. StoreError: try again."""
        if self._newest.vectors.version != version:
            with disk(f"cannot read version {version} again"):
                self._newest.recover()

    def _make(self, made: Round, position: RunPosition) -> Checkpoint:
        """Write a version; after an error nothing of it is left on disk."""
        manifest, version, settings = self._run.manifest, made.version, self._settings
        book, current = self._book, self._run.kept.get(version - 1).record
        step = settings.outer.numbers(version, position.fade, _mean_steps(made.merged))
        # Factors of several versions have no mean: each version has a basis of its own.
        has_mean = not position.is_planned and settings.product_rule is None
        share = mean_share(version) if has_mean and not settings.sets_weights else 0.0
        average = self._merge.average(made, self._newest.vectors)
        with (
            disk(f"cannot write version {version}"),
            VersionWriter(self._run.files, self._run.checkpoints, version, manifest) as writer,
        ):
            held = _Held(MOST_HELD_BYTES_PER_VALUE * manifest.values)
            self._run.kept.hold_update(-1, ())
            if not settings.sets_weights:
                held.file = writer.frames(UPDATE)
            self._newest.make_way(version, must_finish=self._full_fetch())
            change = self._newest.vectors.advance(
                version, average.chunks, step, share, take=held.take, sets=settings.sets_weights
            )
            if average.steps is not None:  # the steps are sent, instead of the change
                coded = len(frame_of([average.steps]) or b"")
                change = Change(change.digest, coded, average.norm, average.norm)
            stored = writer.seal(self._run.pool)
            self._run.begin_version(version)
            record = VersionRecord(
                version=version,
                digest=change.digest,
                parent=current.digest,
                generation=book.generation,
                fingerprint=manifest.fingerprint,
                merged=tuple(_counted(one, average) for one in made.merged),
                scale=made.scale,
                tokens_total=book.tokens_total + sum(one.delta.tokens for one in made.merged),
                update_bytes=change.update_bytes,
                update_chunks=manifest.chunks if average.steps is None else 1,
                update_norm=change.update_norm,
                average_norm=change.average_norm,
                cosine=self._cosine(made, change.average_norm),
                mean_share=share,
                learning_rate=step.learning_rate,
                momentum=step.momentum,
                progress=position.known_progress,
                rule=settings.rule_name,
                seeds=average.steps,
                reused=tuple(made.reused),
            )
            checkpoint = writer.publish(record, stored)
        self._run.kept.hold_update(version, held.frames)
        return checkpoint

    def _cosine(self, made: Round, norm: float) -> float | None:
        """Return the deltas' mean cosine; None where the average is not their weighted sum."""
        kind = self._settings.kind
        if kind.is_full or isinstance(kind, Masked) or self._settings.leaves_out:
            return None
        return mean_cosine(made.merged, made.scale, norm)


@define
class _Held:
    """A coded change while it is made: its file, and its frames if they are not too many."""

    most_bytes: int
    file: FrameWriter | None = None
    frames: list[bytes] = field(factory=list)

    def take(self, frame: bytes) -> None:
        """Take the next frame. Raises OSError."""
        assert self.file is not None, "there is a coded change"
        self.file.append(frame)
        if self.file.bytes <= self.most_bytes:
            self.frames.append(frame)
        else:
            self.frames.clear()


def _mean_steps(merged: Sequence[MergedDelta]) -> float:
    """Steps of a client in the round, in the mean; several deltas of one are its work."""
    clients = {one.key.client for one in merged}
    return sum(one.delta.steps for one in merged) / max(1, len(clients))


def _counted(one: MergedDelta, average: Average) -> MergedDelta:
    """Return a delta as it counted: the weight is 0 where the rule left it out."""
    weight = one.weight if one.key in average.counted else 0.0
    norm = average.product_norms.get(one.key.client, 0.0) if weight else 0.0
    return evolve(one, weight=weight, product_norm=norm)


def merge_of(run: RunDirectory) -> Merge:
    """Return the merge of a run."""
    settings = run.settings
    kind: type[Merge] = SumMerge
    if settings.product_rule is not None:
        kind = ProductsMerge
    elif settings.channel is not None:
        kind = ChannelMerge
    elif settings.upstream is not None:
        kind = UpstreamMerge
    elif isinstance(settings.kind, Masked):
        kind = SecureMerge
    elif settings.rule.by_rows:
        kind = RowsMerge
    return kind(run.manifest, run.spool, run.pool, settings)

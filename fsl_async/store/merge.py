"""Merge: how the deltas of a round become the average that makes the next version.

A run has one merge, by its settings:

    SumMerge         the weighted sum; deltas are added while they arrive        (here)
    RowsMerge        a rule over the clients' rows, read from the spool          (merge_rows)
    ProductsMerge    a rule of adapters that merges module by module             (merge_products)

Which frames a delta has, and how they are decoded, is in its kind (fsl_async.store.delta_kind).
Recovery makes a version again by the same merge, from the record and the spool, so the same bits
must follow from the same deltas, in whatever order they arrived.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define, evolve, field, frozen

from fsl_async.errors import disk_words
from fsl_async.store.errors import DeltaDamaged, NotFinite, NoWorkerThread, StoreError
from fsl_async.store.outer import average_full
from fsl_async.store.seed_step import is_finite, keys_of
from fsl_codecs import CodecError, add_signs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, MergedDelta, StoredDelta
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.memory import Allocate
    from fsl_async.store.records import StoreSettings, VersionRecord
    from fsl_async.store.seed_step import SeedStep
    from fsl_async.store.spool import Spool
    from fsl_async.store.vectors import Vectors

    Chunks = Iterable[NDArray[np.float32]]

MOST_BEFORE: Final = 2
"""A delta is added while it arrives if the sum holds at most this many deltas.

Removing it means adding those deltas again.
"""

PARTS: Final = 4
"""Parts of a delta's frames for each thread, so that none waits long for another."""


@frozen
class Round:
    """The deltas that a version is made of.

    merged: in order, with their final weights and clips. reused: merged by earlier versions, and a
    part of this one again. deltas: as they were accepted. is_decided: the version was made before,
    and `merged` has the weight 0 for deltas that the rule did not choose.
    """

    version: int
    merged: Sequence[MergedDelta]
    scale: float
    reused: Sequence[MergedDelta]
    deltas: Mapping[DeltaKey, StoredDelta]
    is_decided: bool = False


@frozen
class Average:
    """The average of a round.

    chunks: float32, in flat order, each valid until the next; where the rule keeps what it owes,
    two rows; where a run sets its weights (`StoreSettings.sets_weights`), the next version's.
    counted: the deltas that are in it.
    """

    chunks: Chunks
    counted: Collection[DeltaKey]
    steps: SeedStep | None = None
    """The steps of a version of zeroth order."""
    norm: float = 0.0
    """Their norm as a vector of the model's size."""
    product_norms: Mapping[str, float] = field(factory=dict)
    """By client: how far it moved the products of adapters; complete when the chunks are taken."""


class Merge(ABC):
    """The merge of one run. It belongs to the store's thread."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, settings: StoreSettings
    ) -> None:
        self._manifest = manifest
        self._spool = spool
        self._pool = pool
        self._settings = settings
        self._kind = settings.kind

    def average(self, a_round: Round, vectors: Vectors) -> Average:
        """Return the average of a round. vectors: of the version before.

        StoreError: a delta cannot be read, or there are too few.
        """
        merged = [one for one in a_round.merged if self._kind.fits(one.key, a_round.version)]
        if len(merged) < len(a_round.merged):
            clients = {one.key.client for one in merged}
            if len(clients) < max(1, self._settings.rule.least):
                zeros = np.zeros(sum(self._kind.parts(self._manifest)))
                return self._of_scalars(zeros, (), a_round, vectors)
        return self._average(evolve(a_round, merged=merged), vectors)

    @abstractmethod
    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        """Return the average of a round whose deltas all can count."""

    def again(
        self, record: VersionRecord, vectors: Vectors, deltas: Mapping[DeltaKey, StoredDelta]
    ) -> Chunks:
        """Return the average that a version was made of."""
        if record.seeds is not None:
            return self._moved(record.seeds, vectors)
        merged, reused = record.merged, record.reused
        made = Round(record.version, merged, record.scale, reused, deltas, is_decided=True)
        return self._average(made, vectors).chunks

    def _of_scalars(
        self, mean: NDArray[Any], counted: Collection[DeltaKey], a_round: Round, vectors: Vectors
    ) -> Average:
        """Return the average of a round of zeroth order, by the mean of its scalars."""
        directions = self._kind.directions
        steps = directions.step(a_round.version - 1, mean)
        if not is_finite(steps):
            raise NotFinite(f"the steps of version {a_round.version} are not finite")
        norm = math.sqrt(directions.squared_norm(self._manifest.values, mean))
        return Average(self._moved(steps, vectors), counted, steps, norm)

    def _moved(self, steps: SeedStep, vectors: Vectors) -> Chunks:
        """Yield the weights moved along directions of signs (fsl_async.store.seed_step)."""
        keys, scalars = keys_of([steps])

        def moved(index: int) -> NDArray[np.float32]:
            weights = vectors.weights_chunk(index).copy()
            with np.errstate(over="ignore", invalid="ignore"):
                add_signs(weights, self._manifest.chunk_range(index)[0], keys, scalars)
            return weights

        return self._pool.each(moved, range(self._manifest.chunks))

    # --- deltas that arrive: for a merge that adds them up at once ---

    def arriving(  # noqa: B027 - most merges read complete deltas
        self, key: DeltaKey, weight: float, index: int, content: Any, *, before: int
    ) -> None:
        """Take a frame of an incomplete delta. weight: its probable one.

        content: as `DeltaKind.check` returned it. before: how many other deltas are pending.
        """

    def arrived(  # noqa: B027
        self, key: DeltaKey, weight: float, *, before: int
    ) -> None:
        """Take a delta that has become pending. StoreError: it cannot be read."""

    def remove(self, key: DeltaKey) -> None:  # noqa: B027
        """Remove a delta, or the frames of it that have arrived. Absent keys are ignored."""

    def holds(self, key: DeltaKey) -> bool:
        """Whether the next version can be made without the delta's file."""
        return False

    def clear(self) -> None:  # noqa: B027 - most merges hold nothing
        """Begin the next round."""

    def too_large(self, moved: float, vectors: Vectors) -> tuple[str, bool] | None:
        """Return why values of a delta must not be merged, and whether the version is at fault.

        None: they may. moved: norm of all that the delta's client moves in this round.
        """
        return None


@define
class _Extra:
    """Frames in the sum, first <= index < stop, that belong to no complete delta."""

    key: DeltaKey | None
    """The delta that is arriving. None: the frames must be recomputed."""
    weight: float
    first: int
    stop: int


class SumMerge(Merge):
    """The sum of weight_i * Delta_i: one vector of the model's size.

    Deltas are added in the order in which they became pending. A subtraction cannot undo an
    addition in fp32. To remove a delta, the frames that contain it are recomputed from the other
    deltas, which are still in the spool, before the sum is used: `chunks` always yields, to the
    bit, the sum of the deltas in `weights` in their order.

    One delta at a time may be added frame by frame while it arrives, because it is probably the
    next one to be complete (docs/adr/0095). After any error `weights` is as before and the sum
    agrees with it; the work for this is done when the sum is used next.
    """

    def __init__(
        self,
        manifest: Manifest,
        spool: Spool,
        pool: ChunkPool,
        settings: StoreSettings,
        allocate: Allocate,
    ) -> None:
        super().__init__(manifest, spool, pool, settings)
        self.total = settings.kind.total(manifest, allocate)
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every complete delta in the sum, in the order of addition."""
        self._frames = settings.kind.frames(manifest)
        self._extra: _Extra | None = None
        self._clips: dict[DeltaKey, float] = {}

    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        self._assemble(a_round.merged)
        scale, counted = a_round.scale, set(self.weights)
        weight = math.fsum(self.weights.values())
        if self._kind.is_scalars:
            (total,) = self.total.chunks()
            return self._of_scalars(scale * total, counted, a_round, vectors)
        if self._kind.is_full:
            return Average(self._full(vectors, scale, weight), counted)
        return Average(self._scaled(scale, weight), counted)

    def _scaled(self, scale: float, weight: float) -> Iterator[NDArray[np.float32]]:
        """Yield `scale` times the sum, with one fp32 multiplication.

        Of buffers: their mean, which lies between theirs whatever the scale is. weight: the sum of
        the weights in the sum; where it is 0, buffers have no mean, and the chunk is empty.
        """
        buffer = np.empty(self._manifest.longest_chunk, np.float32)
        for index, total in enumerate(self.chunks()):
            part = buffer[: len(total)]
            with np.errstate(over="ignore", invalid="ignore"):
                if not self._manifest.is_buffer(index):
                    np.multiply(total, np.float32(scale), out=part)
                elif weight:
                    np.divide(total, weight, out=part, casting="same_kind")
                else:
                    part = buffer[:0]
            yield part

    def _full(self, vectors: Vectors, scale: float, weight: float) -> Iterator[NDArray[np.float32]]:
        """Yield the average of the clients' weights; see `outer.average_full`."""
        for index, total in enumerate(self.chunks()):
            weights = vectors.weights_chunk(index).copy()
            with np.errstate(over="ignore", invalid="ignore"):
                average_full(total, weights, weight, scale)
            yield weights

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the sum of the deltas in `weights`, chunk by chunk.

        StoreError: a delta cannot be read back from the spool.
        """
        self._clean()
        return self.total.chunks()

    def clear(self) -> None:
        """See `Merge.clear`; the memory is kept."""
        self.weights.clear()
        self._clips.clear()
        self._extra = None
        for index in range(self._frames):
            self.total.clear(index)

    def holds(self, key: DeltaKey) -> bool:
        """See `Merge.holds`."""
        return key in self.weights

    def arriving(
        self, key: DeltaKey, weight: float, index: int, content: Any, *, before: int
    ) -> None:
        """See `Merge.arriving`; one delta at a time. `add` adds the frames that are left out."""
        if len(self.weights) != before:
            return  # another one is the next
        extra = self._extra
        if extra is not None and extra.key is None and not self.weights:
            self._clean()  # reads nothing: the sum holds no complete delta
            extra = None
        if extra is None:
            if len(self.weights) > MOST_BEFORE:
                return
            extra = self._extra = _Extra(key, weight, index, index)
        if (extra.key, extra.weight, extra.stop) != (key, weight, index):
            return
        extra.key, extra.stop = None, index + 1  # until the addition has succeeded
        if not self.total.add(index, content, weight):
            extra.stop = index
        extra.key = key

    def arrived(self, key: DeltaKey, weight: float, *, before: int) -> None:
        """See `Merge.arrived`."""
        if len(self.weights) == before:
            self.add(key, weight)

    def add(self, key: DeltaKey, weight: float, clip: float = 1.0) -> None:
        """Add a delta from the spool, with what is in the sum of it already.

        StoreError: this delta, or one that is in the sum, cannot be read.
        """
        extra = self._extra
        there = range(0)
        if extra is not None and (extra.key, extra.weight, 1.0) == (key, weight, clip):
            there = range(extra.first, extra.stop)
        else:
            self._clean()
        indices = range(self._frames)
        self._extra = _Extra(None, 0.0, 0, len(indices))  # until the addition has succeeded
        self._add(key, weight, clip, [index for index in indices if index not in there])
        self.weights[key], self._clips[key] = weight, clip
        self._extra = None

    def _assemble(self, merged: Sequence[MergedDelta]) -> None:
        """Make this the sum of exactly `merged`, in their order, with their weights and clips.

        What is in it already stays if they begin with it. Raises as `add`.
        """
        wanted = [(one.key, one.weight, one.clip) for one in merged]
        there = [(key, weight, self._clips[key]) for key, weight in self.weights.items()]
        if wanted[: len(there)] != there:
            self.clear()
        for one in wanted[len(self.weights) :]:
            self.add(*one)
        self._clean()

    def remove(self, key: DeltaKey) -> None:
        """See `Merge.remove`."""
        if self.weights.pop(key, None) is not None:
            self._extra = _Extra(None, 0.0, 0, self._frames)
        elif self._extra is not None and self._extra.key == key:
            self._extra.key = None

    def _clean(self) -> None:
        """Recompute the frames that hold something else.

        After a StoreError the next call tries again.
        """
        extra = self._extra
        if extra is None:
            return
        extra.key = None
        indices = range(extra.first, extra.stop)
        for index in indices:
            self.total.clear(index)
        for key, weight in self.weights.items():
            self._add(key, weight, self._clips[key], indices)
        self._extra = None

    def _add(self, key: DeltaKey, weight: float, clip: float, indices: Sequence[int]) -> None:
        """Add these frames of a delta.

        StoreError: they cannot be read; some of them may be in the sum.
        """
        if not indices:
            return  # its file may be gone, and the sum has it

        def add(part: Sequence[int]) -> None:
            for index, frame in zip(part, reader.frames(part), strict=True):
                self.total.add_frame(index, frame, weight, clip)

        with reading(key):
            reader = self._spool.reader(key, self._manifest)
            # A delta of seeds has one frame, whatever others have.
            there = [index for index in indices if index < reader.count]
            # A frame takes less time than handing it to a thread.
            length = max(1, -(-len(there) // (PARTS * self._pool.threads)))
            parts = [there[at : at + length] for at in range(0, len(there), length)]
            self._pool.run(add, parts)


@contextmanager
def reading(key: DeltaKey) -> Iterator[None]:
    """Turn errors of reading a spooled delta into DeltaDamaged, or a StoreError of one line."""
    try:
        yield
    except (NoWorkerThread, DeltaDamaged):
        raise
    except (FileNotFoundError, CodecError, StoreError, StopIteration) as error:
        raise DeltaDamaged(key.text, str(error)) from error
    except OSError as error:
        raise StoreError(
            f"delta {key.text} cannot be read back from the spool: {disk_words(error)}"
        ) from error

"""Accumulator: the sum of weight_i * Delta_i of a round, the ps's only vector of model size.

Deltas are added in the order of the calls to `add`. A subtraction cannot undo an addition in fp32.
To remove a delta, the frames that contain it are recomputed from the other deltas, which are still
in the spool, before the sum is used: `chunks` always yields, to the bit, the sum of the deltas in
`weights` in their order. `assemble` sets them to those of a version (docs/adr/0166).

One delta at a time may be added frame by frame while it arrives, because it is probably the next
one to be complete (docs/adr/0095).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import define

from fsl_async.errors import disk_words
from fsl_async.store.errors import DeltaDamaged, NoWorkerThread, StoreError
from fsl_async.store.memory import anonymous
from fsl_codecs import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.delta_kind import DeltaKind
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.memory import Allocate
    from fsl_async.store.spool import Spool

MOST_BEFORE: Final = 2
"""A delta is added while it arrives if the sum holds at most this many deltas.

Removing it means adding those deltas again.
"""


PARTS: Final = 4
"""Of a delta's frames for each thread, so that none waits long for another."""


@define
class _Extra:
    """Frames in the sum, first <= index < stop, that belong to no complete delta."""

    key: DeltaKey | None
    """The delta that is arriving. None: the frames must be recomputed."""
    weight: float
    first: int
    stop: int


class Accumulator:
    """The sum, and the weights of the deltas in it.

    After any error `weights` is as before and the sum agrees with it; the work for this is done
    when the sum is used next.
    """

    def __init__(
        self,
        manifest: Manifest,
        spool: Spool,
        pool: ChunkPool,
        kind: DeltaKind,
        allocate: Allocate = anonymous,
    ) -> None:
        self.total = kind.total(manifest, allocate)
        self._manifest = manifest
        self._spool = spool
        self._pool = pool
        self._frames = kind.frames(manifest)
        self._extra: _Extra | None = None
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every complete delta in the sum, in the order of addition."""
        self._clips: dict[DeltaKey, float] = {}

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the sum of the deltas in `weights`, chunk by chunk.

        StoreError: a delta cannot be read back from the spool.
        """
        self._clean()
        return self.total.chunks()

    def clear(self) -> None:
        """Set the sum to zero for the next round; the memory is kept."""
        self.weights.clear()
        self._clips.clear()
        self._extra = None
        for index in range(self._frames):
            self.total.clear(index)

    def add_arriving(self, key: DeltaKey, weight: float, index: int, content: Any) -> None:
        """Add a frame of a delta that is still arriving; one delta at a time.

        content: as `DeltaKind.check` returned it. `add` adds the frames that are left out here.
        """
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

    def assemble(self, merged: Sequence[MergedDelta]) -> None:
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
        """Remove a delta, or the frames of it that have arrived. Absent keys are ignored."""
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

        try:
            reader = self._spool.reader(key, self._manifest)
            # A delta of seeds has one frame, whatever others have.
            there = [index for index in indices if index < reader.count]
            # A frame takes less time than handing it to a thread.
            length = max(1, -(-len(there) // (PARTS * self._pool.threads)))
            parts = [there[at : at + length] for at in range(0, len(there), length)]
            self._pool.run(add, parts)
        except NoWorkerThread:
            raise
        except (FileNotFoundError, CodecError, StoreError) as error:
            raise DeltaDamaged(key.text, str(error)) from error
        except OSError as error:
            raise StoreError(
                f"delta {key.text} cannot be read back from the spool: {disk_words(error)}"
            ) from error

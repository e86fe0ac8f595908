"""Accumulator: the sum of weight_i * Delta_i of the round. It holds the one vector of the model's
size that the server keeps.

Deltas are added in the order in which `add` is called. An addition in fp32 cannot be undone by a
subtraction, so where something has to come out again, the frames that it is in are made anew from
the other deltas, which are still in the spool, before the sum is used: `chunks` is always, to the
bit, the sum of the deltas in `weights` in their order.

So one delta at a time may be added while it is still arriving, frame by frame, because it will
probably be the next one that is complete (docs/adr/0095).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import define

from fsl_async.errors import disk_words
from fsl_async.store.errors import DeltaDamaged, NoWorkerThread, StoreError
from fsl_codecs import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.delta_kind import DeltaKind
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.spool import Spool

MOST_BEFORE: Final = 2
"""How many deltas may be in the sum when another is added while it arrives: at most so many are
added again where it has to come out.
"""


@define
class _Extra:
    """What is in the sum beside the complete deltas: frames of one that is arriving, first <= index
    < stop.
    """

    key: DeltaKey | None
    """None: whatever it is, it has to come out."""
    weight: float
    first: int
    stop: int


class Accumulator:
    """The sum, and what is in it.

    After any error `weights` are as before, and the sum fits them; the work that this takes is done
    when the sum is used next.
    """

    def __init__(self, manifest: Manifest, spool: Spool, pool: ChunkPool, kind: DeltaKind) -> None:
        self.total = kind.total(manifest)
        self._spool = spool
        self._pool = pool
        self._frames = kind.frames(manifest)
        self._extra: _Extra | None = None
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every complete delta in the sum, in the order of addition."""

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The sum of the deltas in `weights`, chunk by chunk. StoreError: one of them cannot be
        read back.
        """
        self._clean()
        return self.total.chunks()

    def clear(self) -> None:
        """Back to zero, for the next round; the memory is kept."""
        self.weights.clear()
        self._extra = None
        for index in range(self._frames):
            self.total.clear(index)

    def add_arriving(self, key: DeltaKey, weight: float, index: int, content: Any) -> None:
        """Add a frame of a delta that is still arriving, unless another one is being added like
        that.

        content: as `DeltaKind.check` returned it. `add` adds what is left out here.
        """
        extra = self._extra
        if extra is not None and extra.key is None and not self.weights:
            self._clean()  # nothing has to be read for that
            extra = None
        if extra is None:
            if len(self.weights) > MOST_BEFORE:
                return
            extra = self._extra = _Extra(key, weight, index, index)
        if (extra.key, extra.weight, extra.stop) != (key, weight, index):
            return
        extra.key, extra.stop = None, index + 1  # unless all goes well
        if not self.total.add(index, content, weight):
            extra.stop = index
        extra.key = key

    def add(self, key: DeltaKey, weight: float) -> None:
        """Add a delta from the spool. StoreError: it cannot be read, or one that is in the sum
        cannot.
        """
        extra = self._extra
        there = range(0)
        if extra is not None and (extra.key, extra.weight) == (key, weight):
            there = range(extra.first, extra.stop)
        else:
            self._clean()
        indices = range(self._frames)
        self._extra = _Extra(None, 0.0, 0, len(indices))  # unless all goes well
        self._add(key, weight, [index for index in indices if index not in there])
        self.weights[key] = weight
        self._extra = None

    def remove(self, key: DeltaKey) -> None:
        """Take a delta out again, or what has arrived of it; fine when it is not in the sum."""
        if self.weights.pop(key, None) is not None:
            self._extra = _Extra(None, 0.0, 0, self._frames)
        elif self._extra is not None and self._extra.key == key:
            self._extra.key = None

    def _clean(self) -> None:
        """Make the frames anew that something else is in. StoreError: the next call tries it
        again.
        """
        extra = self._extra
        if extra is None:
            return
        extra.key = None
        indices = range(extra.first, extra.stop)
        for index in indices:
            self.total.clear(index)
        for key, weight in self.weights.items():
            self._add(key, weight, indices)
        self._extra = None

    def _add(self, key: DeltaKey, weight: float, indices: Sequence[int]) -> None:
        """Add these frames of a delta. StoreError: they cannot be read; some of them may be in the
        sum.
        """

        def add(numbered: tuple[int, bytes]) -> None:
            self.total.add_frame(*numbered, weight)

        try:
            frames = self._spool.frames(key, self._frames, indices)
            self._pool.run(add, zip(indices, frames, strict=True))
        except NoWorkerThread:
            raise
        except (FileNotFoundError, CodecError, StoreError) as error:
            raise DeltaDamaged(key.text, str(error)) from error
        except OSError as error:
            raise StoreError(
                f"delta {key.text} cannot be read back from the spool: {disk_words(error)}"
            ) from error

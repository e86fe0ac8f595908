"""Accumulator: the sum of weight_i * Delta_i of the round, the one vector of the model's size that the server holds.

Deltas are added in the order in which `add` is called, each chunk by one fp32 multiplication and one fp32 addition per value, straight from
their coded frames. Addition in fp32 cannot be undone by subtraction, so where something is to come out again the chunks that it is in are made anew
from the others, which are still in the spool, before anybody sees the sum: `values` is always, to the bit, that of the deltas in `weights` in their order.

That is what lets one delta at a time be added while it is still coming, chunk by chunk, in the hope that it is the next to be whole (docs/adr/0095).

Where a delta is whole weights (docs/adr/0045) the sum is float64: weights of opposite sign may cancel down to nearly nothing, and an
average that is nearly nothing has to be as right as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define

from fsl_async.errors import disk_words
from fsl_async.store.errors import DeltaDamaged, NoWorkerThread, StoreError
from fsl_codecs import CodecError, decode_accumulate, decode_into, new_vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.files import BytesLike
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.spool import Spool

MOST_BEFORE: Final = 2
"""How many deltas may be in the sum when another is added while it comes: so many are added again, at the most, where it has to come out."""


@define
class _Extra:
    """What is in the vector beside the whole deltas: chunks of one that is coming, first <= index < stop."""

    key: DeltaKey | None
    """None: whatever it is, it has to come out."""
    weight: float
    first: int
    stop: int


class Accumulator:
    """The sum, and what is in it. The vector is allocated when the first chunk is added.

    After any error `weights` are as before, and `values` fits them; what that takes is done when somebody asks for it next.
    """

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, *, whole: bool = False
    ) -> None:
        self._manifest = manifest
        self._spool = spool
        self._pool = pool
        self._add_frame = add_whole if whole else add_difference
        self._dtype: type[np.floating[Any]] = np.float64 if whole else np.float32
        self._vector: NDArray[Any] | None = None
        self._extra: _Extra | None = None
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every whole delta in the sum, in the order of addition."""

    @property
    def values(self) -> NDArray[Any]:
        """The sum of the deltas in `weights`: float32 (float64 of whole weights), all values of the model. StoreError: one of them cannot be read back."""
        self._clean()
        return self._total

    def clear(self) -> None:
        """Back to zero, for the next round; the memory is kept."""
        self.weights.clear()
        self._extra = None
        if self._vector is not None:
            self._vector.fill(0.0)

    def add_chunk(self, key: DeltaKey, weight: float, index: int, frame: BytesLike) -> None:
        """Add a chunk of a delta that is still coming, unless another one is being added like that; whatever is left out here `add` adds."""
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
        start, stop = self._manifest.chunk_range(index)
        total = self._total[start:stop]
        extra.key, extra.stop = None, index + 1  # unless all goes well
        self._add_frame(frame, total, weight)
        extra.key = key

    def add(self, key: DeltaKey, weight: float) -> None:
        """Add a delta from the spool. StoreError: it cannot be read, or one that is in the sum cannot."""
        extra = self._extra
        there = range(0)
        if extra is not None and (extra.key, extra.weight) == (key, weight):
            there = range(extra.first, extra.stop)
        else:
            self._clean()
        chunks = range(self._manifest.chunks)
        self._extra = _Extra(None, 0.0, 0, len(chunks))  # unless all goes well
        self._add(key, weight, [index for index in chunks if index not in there])
        self.weights[key] = weight
        self._extra = None

    def remove(self, key: DeltaKey) -> None:
        """Take a delta out again, or what has come of it; fine when it is not in the sum."""
        if self.weights.pop(key, None) is not None:
            self._extra = _Extra(None, 0.0, 0, self._manifest.chunks)
        elif self._extra is not None and self._extra.key == key:
            self._extra.key = None

    @property
    def _total(self) -> NDArray[Any]:
        if self._vector is None:
            self._vector = new_vector(self._manifest.values, self._dtype)
        return self._vector

    def _clean(self) -> None:
        """Make the chunks anew that something else is in. StoreError: the next call tries it again."""
        extra = self._extra
        if extra is None:
            return
        extra.key = None
        chunks = range(extra.first, extra.stop)
        for index in chunks:
            start, stop = self._manifest.chunk_range(index)
            self._total[start:stop].fill(0.0)
        for key, weight in self.weights.items():
            self._add(key, weight, chunks)
        self._extra = None

    def _add(self, key: DeltaKey, weight: float, chunks: Sequence[int]) -> None:
        """Add these chunks of a delta. StoreError: they cannot be read, and nobody knows which of them are in the vector."""
        total = self._total

        def add_chunk(numbered: tuple[int, bytes]) -> None:
            start, stop = self._manifest.chunk_range(numbered[0])
            self._add_frame(numbered[1], total[start:stop], weight)

        try:
            frames = self._spool.frames(key, self._manifest, chunks)
            self._pool.run(add_chunk, zip(chunks, frames, strict=True))
        except NoWorkerThread:
            raise
        except (FileNotFoundError, CodecError, StoreError) as error:
            raise DeltaDamaged(key.text, str(error)) from error
        except OSError as error:
            raise StoreError(
                f"delta {key.text} cannot be read back from the spool: {disk_words(error)}"
            ) from error


def add_difference(frame: BytesLike, total: NDArray[Any], weight: float) -> None:
    """Add a chunk of a delta to `total`, float32. Raises CodecError."""
    decode_accumulate(frame, total, weight)


def add_whole(frame: BytesLike, total: NDArray[Any], weight: float) -> None:
    """Add a chunk of whole weights to `total`, float64. Raises CodecError."""
    values = np.empty(len(total), np.float32)
    decode_into(frame, values)
    # A product of two fp32 numbers, and most sums of such products, are exact in float64. What is not finite comes out again.
    with np.errstate(invalid="ignore"):
        total += np.multiply(values, weight, dtype=np.float64)

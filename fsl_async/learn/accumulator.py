"""Accumulator: the sum of weight_i * Delta_i of the round, the one vector of the model's size that the server holds.

Deltas are added in the order in which they are acknowledged, each chunk by one fp32 multiplication and one fp32 addition per value, straight from
their coded frames in the spool. Addition in fp32 cannot be undone by subtraction, so taking a delta out again means adding
the others once more; they are still in the spool.

One delta at a time is added while it is still coming, chunk by chunk, in the hope that it is acknowledged next (docs/adr/0095). Where it is not, the
chunks that it is in are made again from the others before anybody uses the sum. So the sum is always, to the bit, that of the deltas in `weights` in
their order.

Where a delta is whole weights (docs/adr/0045) the sum is float64: weights of opposite sign may cancel down to nearly nothing, and an
average that is nearly nothing has to be as right as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define

from fsl_async.learn.errors import NoThread, StoreError
from fsl_codecs import CodecError, decode_accumulate, decode_into, new_vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.events import DeltaKey
    from fsl_async.learn.chunk_pool import ChunkPool
    from fsl_async.learn.manifest import Manifest
    from fsl_async.learn.spool import Spool

MOST_BEFORE: Final = 4
"""How many deltas may be in the sum when another is added while it comes: so many are added again, at the most, where it breaks off."""


@define
class _Coming:
    """The delta that is added while it comes, and which of its chunks are in the sum: first <= index < stop."""

    key: DeltaKey | None
    """None: it will not be acknowledged, and its chunks have to be made again without it."""
    weight: float
    first: int
    stop: int


class Accumulator:
    """The sum, and what is in it. The vector is allocated when the first chunk is added."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, *, whole: bool = False
    ) -> None:
        self._manifest = manifest
        self._spool = spool
        self._pool = pool
        self._whole = whole
        self._vector: NDArray[Any] | None = None
        self._coming: _Coming | None = None
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every whole delta in the sum, in the order of addition."""

    @property
    def values(self) -> NDArray[Any]:
        """The sum of the deltas in `weights`: float32 (float64 of whole weights), all values of the model. StoreError: one of them cannot be read back."""
        self._take_out()
        return self._sum

    def clear(self) -> None:
        """Back to zero, for the next round; the memory is kept."""
        self.weights.clear()
        self._coming = None
        if self._vector is not None:
            self._vector.fill(0.0)

    def add_chunk(
        self, key: DeltaKey, weight: float, index: int, values: NDArray[np.float32]
    ) -> None:
        """Add a chunk of a delta that is still coming, unless another one is being added like that; whatever is left out here `add` adds.

        values: the chunk, which may be overwritten.
        """
        if self._coming is None:
            if len(self.weights) > MOST_BEFORE:
                return
            self._coming = _Coming(key, weight, index, index)
        coming = self._coming
        if (coming.key, coming.weight, coming.stop) != (key, weight, index):
            return
        start, stop = self._manifest.chunk_range(index)
        add = _add_whole if self._whole else _add_difference
        add(values, self._sum[start:stop], weight)
        coming.stop += 1

    def add(self, key: DeltaKey, weight: float) -> None:
        """Add a delta from the spool. StoreError: it cannot be read, and the sum is as it was before."""
        coming = self._coming
        try:
            if coming is not None and (coming.key, coming.weight) != (key, weight):
                self._take_out()
            self._add(key, weight, self._missing())
        except NoThread:
            self._fill_again(self.weights)
            raise
        except StoreError as error:
            self._fill_again(self.weights)
            raise StoreError(f"{error}; quarantine it") from error
        self.weights[key] = weight
        self._coming = None

    def remove(self, key: DeltaKey) -> None:
        """Take a delta out again, or what has come of it; fine when it is not in the sum. StoreError: the sum is empty now."""
        if self._coming is not None and self._coming.key == key:
            self._coming.key = None
        if key in self.weights:
            self._fill_again({other: w for other, w in self.weights.items() if other != key})

    @property
    def _sum(self) -> NDArray[Any]:
        if self._vector is None:
            self._vector = new_vector(
                self._manifest.values, np.float64 if self._whole else np.float32
            )
        return self._vector

    def _missing(self) -> list[int]:
        """The chunks that the delta which is coming is not in yet."""
        coming = self._coming
        there = range(coming.first, coming.stop) if coming is not None else range(0)
        return [index for index in range(self._manifest.chunks) if index not in there]

    def _take_out(self) -> None:
        """Make the chunks again that somebody is in who is not whole. StoreError: the next call tries it again."""
        coming = self._coming
        if coming is None:
            return
        coming.key = None
        chunks = range(coming.first, coming.stop)
        for index in chunks:
            start, stop = self._manifest.chunk_range(index)
            self._sum[start:stop].fill(0.0)
        for key, weight in self.weights.items():
            self._add(key, weight, chunks)
        self._coming = None

    def _add(self, key: DeltaKey, weight: float, chunks: Sequence[int]) -> None:
        """Add these chunks of a delta. StoreError: they cannot be read, and nobody knows which of them are in the sum."""
        total = self._sum

        def add_frame(numbered: tuple[int, bytes]) -> None:
            start, stop = self._manifest.chunk_range(numbered[0])
            if self._whole:
                values = np.empty(stop - start, np.float32)
                decode_into(numbered[1], values)
                _add_whole(values, total[start:stop], weight)
            else:
                decode_accumulate(numbered[1], total[start:stop], weight)

        try:
            frames = self._spool.frames(key, self._manifest, chunks)
            self._pool.run(add_frame, zip(chunks, frames, strict=True))
        except NoThread:
            raise
        except (OSError, CodecError, StoreError) as error:
            raise StoreError(
                f"delta {key.text} cannot be read back from the spool: {error}"
            ) from error

    def _fill_again(self, wanted: dict[DeltaKey, float]) -> None:
        wanted = dict(wanted)
        self.clear()
        for key, weight in wanted.items():
            try:
                self._add(key, weight, range(self._manifest.chunks))
            except NoThread:
                self.clear()
                raise
            except StoreError as error:
                self.clear()  # nothing half added may stay
                raise StoreError(
                    f"{error}; the accumulator is empty now, accumulate the other deltas again"
                ) from error
            self.weights[key] = weight


def _add_difference(values: NDArray[np.float32], total: NDArray[Any], weight: float) -> None:
    """What `decode_accumulate` does, to the bit; the values are overwritten."""
    # What is absurd is not acknowledged, so it is taken out again.
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(values, np.float32(weight), out=values)
        total += values


def _add_whole(values: NDArray[np.float32], total: NDArray[Any], weight: float) -> None:
    # A product of two fp32 numbers, and most sums of such products, are exact in float64.
    total += np.multiply(values, weight, dtype=np.float64)

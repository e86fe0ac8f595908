"""Accumulator: the sum of weight_i * Delta_i of the round, the one vector of the model's size that the server holds.

Deltas are added in the order they come, each chunk by one fp32 multiplication and one fp32 addition per value, straight from
their coded frames in the spool. Addition in fp32 cannot be undone by subtraction, so taking a delta out again means adding
the others once more; they are still in the spool.

Where a delta is whole weights (docs/adr/0045) the sum is float64: weights of opposite sign may cancel down to nearly nothing, and an
average that is nearly nothing has to be as right as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fsl_async.learn.errors import NoThread, StoreError
from fsl_codecs import CodecError, decode_accumulate, decode_into, new_vector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fsl_async.events import DeltaKey
    from fsl_async.learn.chunk_pool import ChunkPool
    from fsl_async.learn.manifest import Manifest
    from fsl_async.learn.spool import Spool


class Accumulator:
    """The sum, and what is in it. The vector is allocated when the first delta is added."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, *, whole: bool = False
    ) -> None:
        self._manifest = manifest
        self._spool = spool
        self._pool = pool
        self._add_frame = _add_whole if whole else _add_difference
        self._dtype: type[np.floating[Any]] = np.float64 if whole else np.float32
        self._sum: NDArray[Any] | None = None
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every delta in the sum, in the order of addition."""

    @property
    def values(self) -> NDArray[Any]:
        """The sum: float32 (float64 of whole weights), all values of the model."""
        if self._sum is None:
            self._sum = new_vector(self._manifest.values, self._dtype)
        return self._sum

    def clear(self) -> None:
        """Back to zero, for the next round; the memory is kept."""
        self.weights.clear()
        if self._sum is not None:
            self._sum.fill(0.0)

    def add(self, key: DeltaKey, weight: float) -> None:
        """Add a delta from the spool. StoreError: it cannot be read, and the sum is as it was before."""
        try:
            self._add(key, weight)
        except NoThread:
            self._fill_again(self.weights)
            raise
        except (OSError, CodecError, StoreError) as error:
            self._fill_again(self.weights)
            raise StoreError(
                f"delta {key.text} cannot be read back from the spool: {error}; quarantine it"
            ) from error

    def remove(self, key: DeltaKey) -> None:
        """Take a delta out again; fine when it is not in the sum. StoreError: the sum is empty now."""
        if key in self.weights:
            self._fill_again({other: w for other, w in self.weights.items() if other != key})

    def _add(self, key: DeltaKey, weight: float) -> None:
        total = self.values

        def add_chunk(numbered: tuple[int, bytes]) -> None:
            start, stop = self._manifest.chunk_range(numbered[0])
            self._add_frame(numbered[1], total[start:stop], weight)

        self._pool.run(add_chunk, enumerate(self._spool.frames(key, self._manifest)))
        self.weights[key] = weight

    def _fill_again(self, wanted: dict[DeltaKey, float]) -> None:
        wanted = dict(wanted)
        self.clear()
        for key, weight in wanted.items():
            try:
                self._add(key, weight)
            except NoThread:
                self.clear()
                raise
            except (OSError, CodecError, StoreError) as error:
                self.clear()  # nothing half added may stay
                raise StoreError(
                    f"delta {key.text} cannot be read back from the spool: {error}; "
                    f"the accumulator is empty now, accumulate the other deltas again"
                ) from error


def _add_difference(frame: bytes, total: NDArray[Any], weight: float) -> None:
    decode_accumulate(frame, total, weight)


def _add_whole(frame: bytes, total: NDArray[Any], weight: float) -> None:
    values = np.empty(len(total), np.float32)
    decode_into(frame, values)
    # A product of two fp32 numbers, and most sums of such products, are exact in float64.
    total += np.multiply(values, weight, dtype=np.float64)

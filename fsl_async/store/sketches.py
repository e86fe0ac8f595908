"""Sketches of deltas: a sample of each, to find clients that train the same batches. NumPy only.

A sketch has the weights of a delta at fixed places of the flat vector, the same for all deltas of a
run, taken while frames are checked: neither a pass of its own nor memory beyond 16 KiB a client.

Deltas of two clients are alike where the cosine of their sketches is above ALIKE and either above
SAME, or the two are twice as close as the median pair of the round. Independent
clients agree too, early in a run and with large batches, but then all do, and not to SAME: see
docs/adr/0141.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.manifest import Manifest

PLACES = 4096
ALIKE = 0.9
SAME = 0.98
LEAST_VALUES = 64.0
"""Values that a sketch must be of in effect, (sum x^2)^2 / sum x^4: fewer are alike by chance."""

LEAST_FOR_OPPOSITE = 3
"""Clients among which one may be opposite to the rest."""

MOST_CLIENTS = 1024
"""Sketches that are kept; the oldest one goes first."""


class Sketches:
    """Of the deltas that are in no version yet, the newest one of each client."""

    def __init__(self) -> None:
        self._places = np.empty(0, np.int64)
        self._found: dict[str, tuple[DeltaKey, NDArray[np.float32]]] = {}

    def take(
        self, manifest: Manifest, key: DeltaKey, index: int, values: NDArray[np.float32]
    ) -> None:
        """Take what chunk `index` of a delta has at the places; nothing of buffers."""
        if manifest.is_buffer(index):
            return
        if not len(self._places):
            rng = np.random.default_rng(manifest.weights)
            drawn = rng.integers(manifest.weights, size=PLACES)
            all_of_it = manifest.weights <= PLACES
            self._places = np.arange(manifest.weights) if all_of_it else np.unique(drawn)
        known, sketch = self._found.get(key.client, (None, None))
        if sketch is None or known != key:
            sketch = np.zeros(len(self._places), np.float32)
            self._found.pop(key.client, None)
            self._found[key.client] = key, sketch
            if len(self._found) > MOST_CLIENTS:
                del self._found[next(iter(self._found))]
        start, stop = manifest.chunk_range(index)
        first, last = np.searchsorted(self._places, (start, stop))
        sketch[first:last] = values[self._places[first:last] - start]

    def compare(self, merged: Iterable[DeltaKey]) -> tuple[dict[str, float], str]:
        """Forget deltas that are merged now, and compare them.

        Returns "client/client" -> cosine of those alike, and the client that is opposite to the
        rest, or empty.
        """
        taken = [one for key in merged if (one := self._pop(key)) is not None]
        usable = sorted((name, sketch) for name, sketch in taken if _is_usable(sketch))
        if len(usable) < 2:
            return {}, ""
        rows = np.array([sketch for _, sketch in usable], np.float64)  # squares leave fp32
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        first, second = np.triu_indices(len(rows), 1)
        products = rows @ rows.T
        cosines = products[first, second]
        near = (cosines > SAME) | (1.0 - cosines < 0.5 * (1.0 - np.median(cosines)))
        alike = {
            f"{usable[first[pair]][0]}/{usable[second[pair]][0]}": round(float(cosines[pair]), 4)
            for pair in np.flatnonzero(near & (cosines > ALIKE))
        }
        turned = opposite(products)
        return alike, "" if turned is None else usable[turned][0]

    def _pop(self, key: DeltaKey) -> tuple[str, NDArray[np.float32]] | None:
        known, sketch = self._found.get(key.client, (None, None))
        if sketch is None or known != key:
            return None
        del self._found[key.client]
        return key.client, sketch


def opposite(products: NDArray[np.float64]) -> int | None:
    """The one of unit vectors that points away from the sum of the others, which agree; or None.

    products: (n, n), of each with each.
    """
    if len(products) < LEAST_FOR_OPPOSITE:
        return None
    to_rest = products.sum(axis=1) - np.diag(products)
    worst = int(np.argmin(to_rest))
    among_rest = np.delete(to_rest - products[:, worst], worst)
    return worst if to_rest[worst] < 0.0 < among_rest.min() else None


def _is_usable(sketch: NDArray[np.float32]) -> bool:
    squares = np.square(sketch, dtype=np.float64)
    most = float(squares.max(initial=0.0))
    if not 0.0 < most < np.inf:
        return False
    squares /= most
    return float(squares.sum() ** 2 / np.square(squares).sum()) >= LEAST_VALUES

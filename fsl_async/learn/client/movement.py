"""Compares two vectors of exchanged weights: whether training has changed anything. NumPy only."""

import numpy as np

from fsl_async.learn.client.ports import Vector
from fsl_async.store.manifest import Manifest

_PIECE_VALUES = 1 << 16


def has_moved(manifest: Manifest, before: Vector, after: Vector) -> bool:
    """Whether any weight differs; true where there are none, but buffers only.

    Stops at the first piece that does, most often the first one.
    """
    for start in range(0, manifest.weights, _PIECE_VALUES):
        stop = min(start + _PIECE_VALUES, manifest.weights)
        if not np.array_equal(before[start:stop], after[start:stop]):
            return True
    return not manifest.weights

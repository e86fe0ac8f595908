"""Deltas for tests, with plausible defaults."""

import numpy as np

from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta


def noise(manifest, seed):
    return np.random.default_rng(seed).standard_normal(manifest.values).astype(np.float32)


def key(client, sequence=1, base=0, incarnation=1):
    return DeltaKey(client, incarnation, base, sequence)


def delta_of(key, tokens=10, steps=2, *, base_digest="", number=0, metrics=None):
    return Delta(key, base_digest, tokens, steps, number, metrics or {})


def stored_of(key, norm=1.0, *, size=99, **work):
    return StoredDelta(delta_of(key, **work), size, norm)


def merged_of(key, weight=1.0, *, staleness=0, **work):
    return MergedDelta(delta_of(key, **work), staleness, weight)

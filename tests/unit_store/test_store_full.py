"""A store of full weights: the average is accurate to fp32, also where weights cancel."""

from fractions import Fraction

import numpy as np
import pytest
from deltas import delta_of

from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
from fsl_async.roles.sync.weighting import TokensWeighting
from fsl_async.store.deltas.delta_kind import FullWeights
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.model.manifest import CHUNK_VALUES, Manifest
from fsl_async.store.rules.outer import Average
from fsl_codecs import CodecSpec

WIDE = Manifest.from_shapes([("w", (2, CHUNK_VALUES // 2 + 5)), ("b", (7,))])
SETTINGS = {"codec_down": CodecSpec(format="fp32"), "outer": Average(), "kind": FullWeights()}


def noise(seed):
    return np.random.default_rng(seed).standard_normal(WIDE.values).astype(np.float32)


def merge(run, *members):
    """Merge (name, vector, tokens, staleness) members as the ps does."""
    work, merged = TokensWeighting(), []
    for name, vector, tokens, staleness in members:
        key = DeltaKey(name, 1, run.store.version, 1 + run.store.version)
        run.send(key, vector, tokens=tokens)
        one = delta_of(key, tokens)
        weight = work.weight(one, staleness)
        merged.append(MergedDelta(one, staleness, weight))
    scale = work.scale(merged)
    return run.store.commit(run.store.version + 1, merged, scale)


@pytest.mark.parametrize("tokens", [1, 10, 49, 12_345_677])
def test_the_weights_of_one_client_are_the_next_version(make_run, tokens):
    """Differences lose weights much smaller than the base; full weights arrive to the bit."""
    run = make_run(manifest=WIDE, **SETTINGS)
    run.start()
    mine = noise(1) * np.float32(1e-6)
    committed = merge(run, ("a", mine, tokens, 0))
    assert np.array_equal(run.weights(1), mine)
    assert committed.digest == digest_of(mine)
    norm = run.store.records[-1].update_norm
    assert norm == pytest.approx(float(np.linalg.norm(mine - noise(0))), rel=1e-5)


def test_an_average_of_opposites_is_accurate_to_fp32(make_run):
    """An fp32 sum of weights that cancel keeps rounding noise, visible near zero."""
    run = make_run(manifest=WIDE, **SETTINGS)
    run.start()
    one = noise(1)
    two = -one * np.float32(1 / 2) + noise(2) * np.float32(1e-5)
    three = noise(3) * np.float32(1e-7)
    merge(run, ("a", one, 10, 0), ("b", two, 20, 0), ("c", three, 3, 0))
    found = run.weights(1)
    for index in range(0, WIDE.values, 997):
        exact = 10 * Fraction(float(one[index])) + 20 * Fraction(float(two[index]))
        exact = (exact + 3 * Fraction(float(three[index]))) / 33
        assert found[index] == np.float32(float(exact))


def test_a_stale_client_leaves_its_share_to_the_old_weights(make_run):
    """A stale model pulls less without shrinking the weights: the old ones get its discount."""
    run = make_run(manifest=WIDE, **SETTINGS)
    run.start()
    merge(run, ("a", noise(1), 10, 0), ("b", noise(2), 10, 3))
    wanted = (noise(1).astype(float) + 0.5 * noise(2) + 0.5 * noise(0)) / 2
    np.testing.assert_allclose(run.weights(1), wanted, rtol=1e-6, atol=1e-9)


def test_full_weights_have_no_update_and_survive_a_restart(make_run):
    """An added update would round once more at each client: they fetch the version in full."""
    run = make_run(manifest=WIDE, **SETTINGS)
    run.start()
    committed = merge(run, ("a", noise(1), 10, 0), ("b", noise(2), 30, 0))
    assert committed.bytes_update == 0
    assert not run.store.has_update(1)
    assert run.open().digest == committed.digest
    wanted = (10.0 * noise(1).astype(float) + 30.0 * noise(2).astype(float)) / 40
    assert np.array_equal(run.weights(1), wanted.astype(np.float32))

"""The mean cosine between deltas is computed from norms alone."""

import numpy as np
import pytest

from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, mean_cosine


def merged(vectors, weights):
    """Deltas with the norms of these vectors."""
    return [
        MergedDelta(
            Delta(DeltaKey(name, 1, 0, 1), "", 8, 2), 0, weight, float(np.linalg.norm(vector))
        )
        for name, vector, weight in zip("abcdef", vectors, weights, strict=False)
    ]


def test_it_is_the_weighted_mean_over_all_pairs():
    """Against the definition, with unequal weights and lengths."""
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((4, 50)) * np.array([[1], [3], [0.5], [2]]) + 0.4
    weights, scale = [1.0, 2.0, 5.0, 0.5], 0.3
    norm = float(np.linalg.norm(scale * np.einsum("i,ij->j", weights, vectors)))
    total = among = 0.0
    for i, one in enumerate(vectors):
        for j, other in enumerate(vectors):
            if i != j:
                share = weights[i] * weights[j]
                total += share * np.linalg.norm(one) * np.linalg.norm(other)
                among += share * float(one @ other)
    assert mean_cosine(merged(vectors, weights), scale, norm) == pytest.approx(among / total)


def test_equal_and_orthogonal_deltas():
    """The two ends that an operator compares with."""
    same = np.ones((3, 8))
    assert mean_cosine(merged(same, [1, 1, 1]), 1 / 3, np.sqrt(8)) == pytest.approx(1.0)
    apart = np.eye(3)
    norm = float(np.linalg.norm(apart.mean(0)))
    assert mean_cosine(merged(apart, [1, 1, 1]), 1 / 3, norm) == pytest.approx(0.0, abs=1e-12)


def test_one_client_has_no_cosine():
    """Nor a round without work."""
    assert mean_cosine(merged(np.ones((1, 8)), [1.0]), 1.0, np.sqrt(8)) is None
    assert mean_cosine([], 0.0, 0.0) is None

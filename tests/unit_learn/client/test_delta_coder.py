"""Coded deltas, and their coding errors."""

import numpy as np

from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_codecs import CodecSpec, decode

COARSE = CodecSpec(format="uniform", step_log2=0)


def gaussian(count, seed):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_a_frame_holds_the_difference_of_the_chunk():
    """A delta is base minus snapshot; the opposite sign would train backwards."""
    base, snapshot = gaussian(1000, 1), gaussian(1000, 2)
    frame = DeltaCoder().encode(base, snapshot, 100, 300)
    assert decode(frame).tolist() == (base[100:300] - snapshot[100:300]).tolist()


def test_with_feedback_nothing_is_lost_over_many_deltas():
    """The sum of all sent deltas differs from the work by the last rounding only."""
    coder, zero = DeltaCoder(COARSE, feedback=True), np.zeros(600, np.float32)
    wanted, sent = np.zeros(600), np.zeros(600)
    for number in range(50):
        delta = gaussian(600, number)
        for start in (0, 300):
            frame = coder.encode(delta, zero, start, start + 300)
            sent[start : start + 300] += decode(frame)
        wanted += delta
    lost = np.linalg.norm(wanted - sent) / np.linalg.norm(gaussian(600, 0))
    assert lost < 0.6
    np.testing.assert_allclose(coder.residual, wanted - sent, atol=1e-4)

"""The outer step against torch, and its sign conventions."""

import numpy as np
import pytest
import torch

from fsl_async.store.outer import (
    OuterSettings,
    OuterStep,
    add_to_mean,
    apply_change,
    desired_change,
    lost_in_coding,
    mean_share,
    squared_norm,
)
from fsl_codecs import CodecSpec, decode, encode


def vectors(count, length=257, seed=3):
    random = np.random.default_rng(seed)
    return [random.standard_normal(length).astype(np.float32) for _ in range(count)]


def test_nesterov_is_that_of_torch():
    """DiLoCo's settings were found with torch.optim.SGD: equal up to one rounding per operation."""
    settings = OuterSettings("nesterov", 0.7, 0.9)
    (start,) = vectors(1, seed=1)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    weights, momentum, residual = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for gradient in vectors(6):
        # Each step starts from the same state, so that rounding errors do not add up.
        parameter.data = torch.from_numpy(weights.copy())
        if "momentum_buffer" in optimizer.state[parameter]:
            optimizer.state[parameter]["momentum_buffer"].copy_(torch.from_numpy(momentum))
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        change = gradient.copy()
        desired_change(
            change,
            momentum,
            residual,
            settings.step(1, 1.0, 50.0),
            keeps_momentum=settings.has_momentum,
        )
        # torch may fuse a multiplication and an addition; the results then differ by the rounding
        # of one term.
        terms = np.abs(weights) + np.abs(gradient) + np.abs(momentum)
        apply_change(weights, change)
        buffer = optimizer.state[parameter]["momentum_buffer"].numpy()
        np.testing.assert_array_max_ulp(momentum, buffer, maxulp=1)
        error = np.abs(weights - parameter.detach().numpy())
        assert np.all(error <= np.spacing(terms))


def test_without_momentum_it_is_plain_descent():
    """With momentum 0 nothing is kept from step to step, and no file is written for it."""
    settings = OuterSettings("nesterov", 0.5, 0.0)
    assert not settings.has_momentum
    change = np.array([2.0, -4.0], dtype=np.float32)
    momentum = np.full(2, 7.0, dtype=np.float32)
    desired_change(
        change,
        momentum,
        np.zeros(2, dtype=np.float32),
        settings.step(1, 1.0, 50.0),
        keeps_momentum=settings.has_momentum,
    )
    assert change.tolist() == [-1.0, 2.0]
    assert momentum.tolist() == [7.0, 7.0]


def test_averaging_gives_the_average_of_the_clients():
    """Plain averaging is FedAvg at any learning rate: the mean of the clients' weights."""
    base, first, second = vectors(3)
    average = ((base - first) + (base - second)) * np.float32(0.5)
    settings = OuterSettings(optimizer="average")
    assert not settings.has_momentum
    desired_change(
        average,
        np.zeros_like(base),
        np.zeros_like(base),
        settings.step(1, 1.0, 50.0),
        keeps_momentum=settings.has_momentum,
    )
    apply_change(base, average)
    np.testing.assert_allclose(base, (first + second) / 2, rtol=0, atol=1e-6)


def test_descent_moves_towards_the_snapshot():
    """A sign error here would train backwards."""
    base = np.array([1.0, 1.0], dtype=np.float32)
    snapshot = np.array([3.0, 0.0], dtype=np.float32)
    change = base - snapshot
    zeros = np.zeros(2, dtype=np.float32)
    desired_change(
        change, zeros.copy(), zeros, OuterSettings().step(1, 1.0, 50.0), keeps_momentum=True
    )
    assert np.sign(change).tolist() == [1.0, -1.0]


def test_error_feedback_keeps_the_coding_error():
    """Without it the fp8 downlink would lose every change below its step size."""
    settings = OuterSettings(optimizer="average")
    spec = CodecSpec(format="e4m3")
    length = 256
    theta = np.zeros(length, dtype=np.float32)
    residual = np.zeros(length, dtype=np.float32)
    wanted = np.zeros(length, dtype=np.float64)
    for gradient in vectors(40, length):
        change = gradient.copy()
        desired_change(
            change,
            np.zeros_like(theta),
            residual,
            settings.step(1, 1.0, 50.0),
            keeps_momentum=settings.has_momentum,
        )
        sent = decode(encode(change, spec))
        apply_change(theta, sent)
        lost_in_coding(change, sent)
        residual = change
        wanted -= gradient
    np.testing.assert_allclose(theta + residual, wanted, atol=1e-4)
    assert np.abs(residual).max() < 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "adam"},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"momentum": 1.0},
        {"momentum": -0.1},
    ],
)
def test_invalid_settings_are_refused(wrong):
    """A run of days must not start with a momentum that diverges."""
    with pytest.raises(ValueError, match="must be"):
        OuterSettings(**wrong)


def test_the_norm_is_finite_exactly_when_the_vector_is():
    """One pass detects NaN and infinity; the largest finite values are not taken for infinite."""
    huge = np.full(1000, np.finfo(np.float32).max, dtype=np.float32)
    assert np.isfinite(squared_norm(huge))
    assert squared_norm(np.array([3.0, 4.0], dtype=np.float32)) == 25.0
    for bad in (np.nan, np.inf, -np.inf):
        huge[500] = bad
        assert not np.isfinite(squared_norm(huge))


@pytest.mark.parametrize("values", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e18, 1e38])
def test_the_norm_is_exact_for_all_sizes_of_values(values, scale):
    """Also where single squares leave the range of fp32, and in the part behind the last row."""
    vector = np.random.default_rng(values).uniform(-1.0, 1.0, values).astype(np.float32)
    vector *= np.float32(scale)
    exact = float(np.sum(vector.astype(np.float64) ** 2))
    assert squared_norm(vector) == pytest.approx(exact, rel=1e-6, abs=0.0)
    vector[-1] = np.nan
    assert not np.isfinite(squared_norm(vector))


def test_growing_begins_and_ends_with_the_average():
    """A start with full momentum overshoots, and the last version must not carry a swing along."""
    growing = OuterSettings("growing")
    assert growing.step(1, 1.0, 50.0) == OuterStep(1.0, 0.0)
    assert growing.step(120, 0.0, 50.0) == OuterStep(1.0, 0.0)
    assert growing.step(11, 1.0, 50.0).momentum == 0.5
    assert growing.step(1000, 1.0, 50.0) == OuterStep(1.0 - 0.9 / 1.9, 0.9)
    assert growing.step(1000, 0.5, 50.0).momentum == pytest.approx(0.45)


def test_short_rounds_have_little_momentum():
    """Rounds of a few steps are data parallel but for the noise, which momentum would add up."""
    growing = OuterSettings("growing")
    found = [growing.step(1000, 1.0, steps).momentum for steps in (0.0, 5.0, 10.0, 15.0, 1e6)]
    assert found == pytest.approx([0.0, 0.5, 0.8, 0.9, 0.9])
    nesterov = OuterSettings("nesterov", 0.7, 0.9)
    assert nesterov.step(1000, 1.0, 1.0) == OuterStep(0.7, 0.9)


def test_growing_is_never_faster_than_the_average_at_once():
    """One average moves the weights at once by 0.93 to 1.11 times itself."""
    for version in (1, 2, 5, 20, 100, 10_000):
        step = OuterSettings("growing").step(version, 1.0, 50.0)
        assert 0.93 < step.learning_rate * (1.0 + step.momentum) < 1.11


def test_momentum_is_kept_through_a_step_without_any():
    """The first step of "growing" has a coefficient of 0; its average is the next momentum."""
    change, momentum = np.float32([2, -4]), np.float32([9, 9])
    zeros = np.zeros(2, np.float32)
    desired_change(change, momentum, zeros, OuterStep(1.0, 0.0), keeps_momentum=True)
    assert change.tolist() == [-2, 4]
    assert momentum.tolist() == [2, -4]


def test_the_mean_of_versions_is_mostly_of_the_last_quarter():
    """Version i counts with about i^3, whatever the length of the run."""
    versions = np.eye(100, dtype=np.float32)
    mean = np.zeros(100, np.float32)
    for number, version in enumerate(versions, start=1):
        add_to_mean(mean, version, mean_share(number))
    assert mean.sum() == pytest.approx(1.0, abs=1e-5)
    assert mean[75:].sum() == pytest.approx(0.68, abs=0.02)
    assert np.all(np.diff(mean) > 0)

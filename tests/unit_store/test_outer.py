"""The outer step against torch, and its sign conventions."""

import numpy as np
import pytest
import torch

from fsl_async.store.rules.outer import (
    Average,
    Growing,
    Nesterov,
    OuterStep,
    add_to_mean,
    mean_share,
    squared_norm,
)


def vectors(count, length=257, seed=3):
    random = np.random.default_rng(seed)
    return [random.standard_normal(length).astype(np.float32) for _ in range(count)]


def test_nesterov_is_that_of_torch():
    """DiLoCo's settings were found with torch.optim.SGD: equal up to one rounding per operation."""
    outer = Nesterov(0.7, 0.9)
    (start,) = vectors(1, seed=1)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    weights, state = start.copy(), {"momentum": np.zeros_like(start)}
    for gradient in vectors(6):
        # Each step starts from the same state, so that rounding errors do not add up.
        parameter.data = torch.from_numpy(weights.copy())
        if "momentum_buffer" in optimizer.state[parameter]:
            held = optimizer.state[parameter]["momentum_buffer"]
            held.copy_(torch.from_numpy(state["momentum"]))
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        # torch may fuse a multiplication and an addition; the results then differ by the rounding
        # of one term.
        change = outer.step(gradient.copy(), state, outer.numbers(1, 1.0, 50.0))
        terms = np.abs(weights) + np.abs(gradient) + np.abs(state["momentum"])
        weights += change
        buffer = optimizer.state[parameter]["momentum_buffer"].numpy()
        np.testing.assert_array_max_ulp(state["momentum"], buffer, maxulp=1)
        error = np.abs(weights - parameter.detach().numpy())
        assert np.all(error <= np.spacing(terms))


def test_without_momentum_it_is_plain_descent():
    """With momentum 0 nothing is kept from step to step, and no file is written for it."""
    outer = Nesterov(0.5, 0.0)
    assert outer.vectors == ()
    average = np.array([2.0, -4.0], dtype=np.float32)
    assert outer.step(average, {}, outer.numbers(1, 1.0, 50.0)).tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("outer", [Average(0.3), Growing()])
def test_the_first_version_is_the_average_of_the_clients(outer):
    """Plain averaging is FedAvg at any learning rate. A sign error here would train backwards."""
    base, first, second = vectors(3)
    average = ((base - first) + (base - second)) * np.float32(0.5)
    state = {name: np.zeros_like(base) for name in outer.vectors}
    base += outer.step(average, state, outer.numbers(1, 1.0, 50.0))
    np.testing.assert_allclose(base, (first + second) / 2, rtol=0, atol=1e-6)


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
    growing = Growing()
    assert growing.numbers(1, 1.0, 50.0) == OuterStep(1.0, 0.0, 1)
    assert growing.numbers(120, 0.0, 50.0) == OuterStep(1.0, 0.0, 120)
    assert growing.numbers(11, 1.0, 50.0).momentum == 0.5
    assert growing.numbers(1000, 1.0, 50.0) == OuterStep(1.0 - 0.9 / 1.9, 0.9, 1000)
    assert growing.numbers(1000, 0.5, 50.0).momentum == pytest.approx(0.45)


def test_short_rounds_have_little_momentum():
    """Rounds of a few steps are data parallel but for the noise, which momentum would add up."""
    growing = Growing()
    found = [growing.numbers(1000, 1.0, steps).momentum for steps in (0.0, 5.0, 10.0, 15.0, 1e6)]
    assert found == pytest.approx([0.0, 0.5, 0.8, 0.9, 0.9])
    nesterov = Nesterov(0.7, 0.9)
    assert nesterov.numbers(1000, 1.0, 1.0) == OuterStep(0.7, 0.9, 1000)


def test_growing_is_never_faster_than_the_average_at_once():
    """One average moves the weights at once by 0.93 to 1.11 times itself."""
    for version in (1, 2, 5, 20, 100, 10_000):
        step = Growing().numbers(version, 1.0, 50.0)
        assert 0.93 < step.learning_rate * (1.0 + step.momentum) < 1.11


def test_momentum_is_kept_through_a_step_without_any():
    """The first step of "growing" has a coefficient of 0; its average is the next momentum."""
    state = {"momentum": np.float32([9, 9])}
    change = Growing().step(np.float32([2, -4]), state, OuterStep(1.0, 0.0))
    assert change.tolist() == [-2, 4]
    assert state["momentum"].tolist() == [2, -4]


def test_the_mean_of_versions_is_mostly_of_the_last_quarter():
    """Version i counts with about i^3, whatever the length of the run."""
    versions = np.eye(100, dtype=np.float32)
    mean = np.zeros(100, np.float32)
    for number, version in enumerate(versions, start=1):
        add_to_mean(mean, version, mean_share(number))
    assert mean.sum() == pytest.approx(1.0, abs=1e-5)
    assert mean[75:].sum() == pytest.approx(0.68, abs=0.02)
    assert np.all(np.diff(mean) > 0)

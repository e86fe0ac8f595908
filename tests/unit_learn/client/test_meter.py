"""A training thread's totals in heartbeats, with and without its metrics."""

import math

import pytest

from fsl_async.learn.client.meter import Meter


def test_totals_say_that_losses_are_not_finite_and_no_loss():
    """A site that keeps its metrics sends these; one bad step among good ones is not reported."""
    meter = Meter()
    for step in range(200):
        meter.count(8, {"loss": math.nan if step == 50 else 2.0})
    assert set(meter.totals()) == {"step", "tokens", "tokens_per_s"}
    for _ in range(20):
        meter.count(8, {"loss": math.inf})
    assert meter.totals()["not_finite"] == 1
    assert "loss" not in meter.totals()
    for _ in range(20):
        meter.count(8, {"loss": 2.0, "skipped": False})
    assert "not_finite" not in meter.totals()
    for _ in range(20):
        meter.count(8, {"loss": 2.0, "skipped": True})
    assert meter.totals()["not_finite"] == 1


def test_heartbeats_carry_the_last_evaluation_and_not_a_mean():
    """A mean over versions would be the loss of none, under the number of none."""
    meter = Meter()
    meter.count(8, {"loss": 4.0, "eval_loss": 3.0, "eval_version": 1.0})
    meter.count(8, {"loss": 2.0, "eval_loss": 2.0, "eval_version": 2.0})
    assert meter.report()["eval_loss"] == 2.0
    assert meter.report()["eval_version"] == 2.0
    assert meter.report()["loss"] == pytest.approx(3.9)


def test_a_wait_that_goes_on_counts_too():
    """A client notes what it has waited before a version while its training thread still waits."""
    now = [10.0]
    meter = Meter(lambda: now[0])
    with meter.waiting():
        now[0] = 12.0
        assert meter.waited_s == 2.0
    now[0] = 20.0
    with meter.waiting():
        now[0] = 21.0
    assert meter.waited_s == 3.0

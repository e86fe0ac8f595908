"""Decides from a client's metrics whether its training goes wrong while weights stay finite. Pure.

Metrics arrive with heartbeats (running means) and with deltas (means over a round). One step with a
loss of NaN makes the mean of its round NaN. The journal writes such numbers as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SKIPPED = "skipped"
"""Metric of the built-in task: 1 for a step skipped because gradients were not finite; else 0."""

NOT_FINITE = "not_finite"
"""On heartbeats, even if a site sends no metrics: most of the last steps had no finite loss or were
skipped."""

LOSS_IS = "its loss is "
"""Begins the text about a loss that is not finite."""

MANY_SKIPPED = 0.5
"""The share of skipped steps that is reported."""

_NOT_FINITE = {"nan", "inf", "-inf"}


def is_not_finite(value: Any) -> bool:
    """Whether a metric is NaN or infinite, as a number or as the journal writes it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and value in _NOT_FINITE


def trouble_in(metrics: Mapping[str, Any]) -> str:
    """What goes wrong, for people; empty when nothing does."""
    loss = metrics.get("loss")
    if is_not_finite(loss):
        return f"{LOSS_IS}{loss}"
    if metrics.get(NOT_FINITE) and "loss" not in metrics:
        return f"{LOSS_IS}not finite, or its steps are skipped"
    skipped = metrics.get(SKIPPED)
    if isinstance(skipped, int | float) and skipped >= MANY_SKIPPED:
        return "it skips most of its steps, as their gradients are not finite"
    return ""

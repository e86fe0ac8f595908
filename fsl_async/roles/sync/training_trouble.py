"""Decides whether a client's training goes wrong: by its metrics, and by what it changes. Pure.

Metrics arrive with heartbeats (running means) and with deltas (means over a round). One step with a
loss of NaN makes the mean of its round NaN. The journal writes such numbers as text.

A snapshot whose steps change no exchanged weight may have a good cause (a loss scale that is being
found, a rate that begins at 0). `ALARM_AFTER` of them in a row are reported, once until weights
change again: by the client, and by the parameter server, which looks at the norms of deltas
(`fsl_async.observe.rounds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import mutable

from fsl_async.roles.machine import Note

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

ALARM_AFTER = 2

CAUSES = (
    "its optimizer may hold other tensors than the attached model (make it after the model's last"
    " change), a GradScaler may skip every step (look at scaler.get_scale()), gradients may be"
    " dropped, or the learning rate is 0"
)


def is_not_finite(value: Any) -> bool:
    """Whether a metric is NaN or infinite, as a number or as the journal writes it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and value in _NOT_FINITE


def trouble_in(metrics: Mapping[str, Any]) -> str:
    """Return a phrase about what goes wrong; empty when nothing does."""
    loss = metrics.get("loss")
    if is_not_finite(loss):
        return f"{LOSS_IS}{loss}"
    if metrics.get(NOT_FINITE) and "loss" not in metrics:
        return f"{LOSS_IS}not finite, or its steps are skipped"
    skipped = metrics.get(SKIPPED)
    if isinstance(skipped, int | float) and skipped >= MANY_SKIPPED:
        return "it skips most of its steps, as their gradients are not finite"
    return ""


@mutable
class Movement:
    """Snapshots in a row whose steps changed no exchanged weight."""

    still: int = 0
    steps: int = 0
    """Steps of those snapshots."""

    def count(self, steps: int, *, moved: bool) -> list[Note]:
        """Count a snapshot of so many steps, at least one."""
        was_told = self.still >= ALARM_AFTER
        if moved:
            self.still = self.steps = 0
            return [Note("training changes the exchanged weights again")] if was_told else []
        self.still += 1
        self.steps += steps
        if self.still != ALARM_AFTER:
            return []
        text = (
            f"{self.steps} steps in {self.still} rounds changed no exchanged weight, and such"
            f" deltas do not count: {CAUSES}"
        )
        return [Note(text, "warning")]

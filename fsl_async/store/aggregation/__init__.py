"""Aggregation rules: how the deltas of a round become one change.

`rule_named` returns a rule; `base` defines what a rule is.
"""

from __future__ import annotations

from fsl_async.store.aggregation.base import Mean, RowClient, Rule
from fsl_async.store.aggregation.coordinate_median import CoordinateMedian
from fsl_async.store.aggregation.latest import Latest
from fsl_async.store.aggregation.multi_krum import MultiKrum
from fsl_async.store.aggregation.trimmed_mean import TrimmedMean

__all__ = ["RULES", "Latest", "Mean", "RowClient", "Rule", "rule_named"]

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Mean, TrimmedMean, CoordinateMedian, MultiKrum, Latest)
}


def rule_named(name: str, byzantine: int = 1) -> Rule:
    """Return the rule called `name`, against `byzantine` clients that may send anything.

    ValueError lists the rules.
    """
    if name not in RULES:
        raise ValueError(f"no aggregation is called {name!r}; there are {', '.join(RULES)}")
    return RULES[name](byzantine)

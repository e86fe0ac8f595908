"""Aggregation rules: how the deltas of a round become one change."""

from fsl_async.store.aggregation.rules import RULES, Latest, Mean, RowClient, Rule, rule_named

__all__ = ["RULES", "Latest", "Mean", "RowClient", "Rule", "rule_named"]

"""The decisions of the methods, by name. The mathematics of the same names is in `fsl_async.learn.split.methods`."""

from __future__ import annotations

from collections.abc import Mapping

from fsl_async.roles.split.methods.base import Decisions, SplitRules
from fsl_async.roles.split.methods.cse_fsl import CseFsl
from fsl_async.roles.split.methods.fedavg import FedAvg
from fsl_async.roles.split.methods.fsl_sage import FslSage
from fsl_async.roles.split.methods.sl import SplitLearning
from fsl_async.roles.split.methods.splitfed_v1 import SplitFedV1
from fsl_async.roles.split.methods.splitfed_v2 import SplitFedV2

__all__ = ["METHODS", "Decisions", "SplitRules", "decisions_of"]

METHODS: Mapping[str, type[Decisions]] = {
    method.name: method
    for method in (SplitLearning, SplitFedV1, SplitFedV2, CseFsl, FslSage, FedAvg)
}


def decisions_of(rules: SplitRules) -> Decisions:
    """The decisions of `rules.method`; raises KeyError when there is none of that name."""
    return METHODS[rules.method](rules)

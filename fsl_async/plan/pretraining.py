"""What a client sends and receives in a synchronization of pretraining. Pure.

A round is a sync: the delta of the whole model goes up and the update comes down, both in the run's
format. Version 0, and the version that a late client downloads, are the whole model in lossless
fp32. The first client uploads version 0 instead of downloading it; the sum is the same.
Method: DiLoCo (Douillard et al., arXiv:2311.08105); docs/ARCHITECTURE.md.
"""

from __future__ import annotations

from fsl_async.accounting.categories import Category
from fsl_async.accounting.shapes import ModelShapes
from fsl_async.accounting.sizes import Accounting, Kind
from fsl_async.plan.memory import whole_model_memory
from fsl_async.plan.methods import Flow, PlannedMethod, Workload, both_ways, whole_model

WAITS = 5
"""The call comes down, the delta goes up; the version is announced, requested, and comes down."""


def _sync(shapes: ModelShapes, _: Workload, count: Accounting) -> tuple[Flow, ...]:
    size = count.values(shapes.whole.values, Kind.DELTA)
    return both_ways(Category.FULL_MODEL, size)


PRETRAIN = PlannedMethod(
    "pretrain", _sync, whole_model, lambda _: WAITS, whole_model_memory, is_cut=False
)

"""Rules that make a version of what clients sent: outer optimizers, aggregation, adapters. Pure.

An operator's own rule derives from a class that is here (docs/OWN_RULES.md).
"""

from fsl_async.store.rules.adapters import AdapterRule
from fsl_async.store.rules.aggregation import Rule
from fsl_async.store.rules.outer import OuterOptimizer

__all__ = ["AdapterRule", "OuterOptimizer", "Rule"]

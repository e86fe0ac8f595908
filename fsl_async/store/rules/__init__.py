"""Rules that make a version of what clients sent, and channels that deliver it. Pure.

An operator's own rule derives from a class that is here (docs/OWN_RULES.md).
"""

from fsl_async.store.rules.adapters import AdapterRule
from fsl_async.store.rules.aggregation import Rule
from fsl_async.store.rules.air import Air, Channel
from fsl_async.store.rules.outer import OuterOptimizer

__all__ = ["AdapterRule", "Air", "Channel", "OuterOptimizer", "Rule"]

"""Rules of federated LoRA: what a site trains of its adapters, and how the sites' become one.

`adapter_rule_named` returns a rule; `base` defines what a rule is, `layout` which tensors of a
manifest are factors. Clients and the parameter server read the same rule.
"""

from fsl_async.store.rules.adapters.base import AdapterRule, Current, Merged, Site
from fsl_async.store.rules.adapters.draws import Draw
from fsl_async.store.rules.adapters.layout import (
    AdapterLayout,
    Module,
    adapter_modules,
    has_adapters,
)
from fsl_async.store.rules.adapters.products import Factors
from fsl_async.store.rules.adapters.rules import (
    FFA,
    RULES,
    Bank,
    FedEx,
    FedIT,
    FedSVD,
    FlexLoRA,
    FLoRA,
    HetLoRA,
    RoLoRA,
    adapter_rule_named,
)

__all__ = [
    "FFA",
    "RULES",
    "AdapterLayout",
    "AdapterRule",
    "Bank",
    "Current",
    "Draw",
    "FLoRA",
    "Factors",
    "FedEx",
    "FedIT",
    "FedSVD",
    "FlexLoRA",
    "HetLoRA",
    "Merged",
    "Module",
    "RoLoRA",
    "Site",
    "adapter_modules",
    "adapter_rule_named",
    "has_adapters",
]  # fmt: skip

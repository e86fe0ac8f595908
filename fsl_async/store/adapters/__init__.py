"""Rules of federated LoRA: what a site trains of its adapters, and how the sites' become one.

`adapter_rule_named` returns a rule; `base` defines what a rule is, `layout` which tensors of a
manifest are factors. Clients and the parameter server read the same rule.
"""

from __future__ import annotations

from fsl_async.store.adapters.bank import Bank
from fsl_async.store.adapters.base import AdapterRule, Current, Merged, Site
from fsl_async.store.adapters.draws import Draw
from fsl_async.store.adapters.fedex import FedEx
from fsl_async.store.adapters.fedit import FedIT
from fsl_async.store.adapters.fedsvd import FedSVD
from fsl_async.store.adapters.ffa import FFA
from fsl_async.store.adapters.flexlora import FlexLoRA
from fsl_async.store.adapters.flora import FLoRA
from fsl_async.store.adapters.hetlora import HetLoRA
from fsl_async.store.adapters.layout import AdapterLayout, Module, adapter_modules, has_adapters
from fsl_async.store.adapters.products import Factors
from fsl_async.store.adapters.rolora import RoLoRA

__all__ = [
    "RULES",
    "AdapterLayout",
    "AdapterRule",
    "Current",
    "Draw",
    "Factors",
    "Merged",
    "Module",
    "Site",
    "adapter_modules",
    "adapter_rule_named",
    "has_adapters",
]

RULES: dict[str, type[AdapterRule]] = {
    rule.name: rule for rule in (FedIT, FFA, RoLoRA, FedSVD, FedEx, FLoRA, HetLoRA, FlexLoRA, Bank)
}


def adapter_rule_named(name: str) -> AdapterRule:
    """Return the rule called `name`. ValueError lists the rules."""
    if name not in RULES:
        raise ValueError(f"no adapter rule is called {name!r}; there are {', '.join(RULES)}")
    return RULES[name]()

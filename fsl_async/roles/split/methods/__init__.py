"""The methods of split learning, by the name that `split.method` gives them.

To add one: a file beside these, and a line in METHODS. Settings, options and help of commands,
planner, comparison, demo and simulator follow from it (docs/adding-a-method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fsl_async.roles.split.methods.base import Method, Settings
from fsl_async.roles.split.methods.cse_fsl import CseFsl
from fsl_async.roles.split.methods.fedavg import FedAvg
from fsl_async.roles.split.methods.fsl_sage import FslSage
from fsl_async.roles.split.methods.sl import SplitLearning
from fsl_async.roles.split.methods.splitfed_v1 import SplitFedV1
from fsl_async.roles.split.methods.splitfed_v2 import SplitFedV2

__all__ = [
    "ALIGNED",
    "AUXILIARY",
    "GRADIENTS",
    "METHODS",
    "TRAINED",
    "WHOLE",
    "Method",
    "method_of",
    "names_of",
]

METHODS: Mapping[str, type[Method]] = {
    method.name: method
    for method in (SplitLearning, SplitFedV1, SplitFedV2, CseFsl, FslSage, FedAvg)
}


def method_of(split: Settings) -> Method:
    """The method of these settings; KeyError for a run that splits no model."""
    return METHODS[split.method](split)


def names_of(which: Callable[[type[Method]], bool] = lambda _: True) -> tuple[str, ...]:
    """Names of the methods of a kind, such as those with an auxiliary model.

    For options and their help.
    """
    return tuple(name for name, method in METHODS.items() if which(method))


ALIGNED = ", ".join(names_of(lambda method: method.auxiliary == "aligned"))
TRAINED = ", ".join(names_of(lambda method: method.auxiliary == "trained"))
AUXILIARY = ", ".join(names_of(lambda method: method.auxiliary != "none"))
GRADIENTS = ", ".join(names_of(lambda method: method.gradients))
WHOLE = names_of(lambda method: not method.has_server)
"""Lists of methods for the help of options: with an aligned auxiliary model, with one that clients
train, with any, those whose steps wait for gradients, and those without a split server."""

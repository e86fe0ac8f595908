"""The mathematics of the methods, one file each, and their names.

To add one: a class in a file of its own that derives from `base.Method`, and a line in METHODS.
"""

from collections.abc import Mapping

from fsl_async.errors import ConfigError
from fsl_async.learn.split.methods.base import Method, MethodSettings
from fsl_async.learn.split.methods.cse_fsl import CseFsl
from fsl_async.learn.split.methods.fedavg import FedAvg
from fsl_async.learn.split.methods.fsl_sage import FslSage
from fsl_async.learn.split.methods.sl import SplitLearning
from fsl_async.learn.split.methods.splitfed_v1 import SplitFedV1
from fsl_async.learn.split.methods.splitfed_v2 import SplitFedV2

METHODS: Mapping[str, type[Method]] = {
    method.name: method
    for method in (SplitLearning, SplitFedV1, SplitFedV2, CseFsl, FslSage, FedAvg)
}


def method(name: str, settings: MethodSettings | None = None) -> Method:
    """The method called `name`. Raises ConfigError with the names that exist."""
    if name not in METHODS:
        raise ConfigError(f"method {name!r} is unknown: {', '.join(METHODS)}", "split.method")
    return METHODS[name](settings or MethodSettings())

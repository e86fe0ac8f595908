"""Errors of split learning.

ConfigError (fsl_async.errors)
├── CutError               a model cannot be cut there; the message lists the cuts that exist
└── AuxiliaryError         an auxiliary model does not fit the cut
LearnError (fsl_async.store.errors)
├── SmashedRefused         activations or labels of a peer make no sense: the peer's fault
└── ModelPartMisused            our own misuse: a step twice, a gradient of another shape
"""

from fsl_async.errors import ConfigError
from fsl_async.store.errors import LearnError


class CutError(ConfigError):
    """A model cannot be cut there. One line, with the cuts that exist."""

    def __init__(self, message: str) -> None:
        super().__init__(message, key="split.cut")


class AuxiliaryError(ConfigError):
    """An auxiliary model does not fit the cut, or cannot be made. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, key="split.auxiliary")


class SmashedRefused(LearnError):  # noqa: N818 - named after what happened, like FrameRefused
    """What a peer sent cannot be trained on; nothing was changed by it. The sender is at fault."""


class ModelPartMisused(LearnError):  # noqa: N818
    """A half was used in the wrong order or with the wrong shapes. This node is at fault."""

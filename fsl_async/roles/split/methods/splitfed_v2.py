"""SplitFed V2: all clients at once, one x_s that is trained on what comes, in the order in which it comes. Pure."""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.split.methods.base import Decisions


class SplitFedV2(Decisions):
    """In lockstep the order is that of the clients, each with all its batches."""

    name: ClassVar[str] = "splitfed-v2"
    gradients: ClassVar[bool] = True

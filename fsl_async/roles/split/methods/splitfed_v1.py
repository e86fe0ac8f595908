"""SplitFed V1: all clients at once, each with a replica of x_s of its own; replicas are averaged as x_c is. Pure."""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.split.methods.base import Decisions


class SplitFedV1(Decisions):
    """Averaged are the replicas of those who said that they are done with the round, before the first upload of a later one."""

    name: ClassVar[str] = "splitfed-v1"
    replicas: ClassVar[bool] = True
    gradients: ClassVar[bool] = True

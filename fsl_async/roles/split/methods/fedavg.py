"""FedAvg: whole models at the clients, averaged; for comparison. There is no split server. Pure."""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.split.methods.base import Decisions


class FedAvg(Decisions):
    """Nothing crosses a cut."""

    name: ClassVar[str] = "fedavg"
    has_server: ClassVar[bool] = False

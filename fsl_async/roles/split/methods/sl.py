"""SL: one client after another trains the one model with the server; x_c is handed on. Pure."""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.split.methods.base import Decisions


class SplitLearning(Decisions):
    """A round is one client's turn: its number is the version that the turn starts from."""

    name: ClassVar[str] = "sl"
    gradients: ClassVar[bool] = True

    @property
    def trigger(self) -> str:
        """Clients take turns in either mode."""
        return "sequential"

    @property
    def waits_at_round_end(self) -> bool:
        """The next client trains with x_s as this one leaves it; every step has waited for its gradient anyway."""
        return True

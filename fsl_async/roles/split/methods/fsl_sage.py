"""FSL-SAGE: clients train by an auxiliary model that the server aligns, now and then, with its own gradients. Pure."""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.split.methods.base import Decisions


class FslSage(Decisions):
    """Every client has an auxiliary model of its own; it is never averaged."""

    name: ClassVar[str] = "fsl-sage"
    aligned: ClassVar[bool] = True

    def uploads_at(self, step: int) -> bool:
        """Steps 0, q, 2 q, ... of a round."""
        return step % self.rules.upload_every == 0

    def aligns_in(self, round_: int) -> bool:
        """Rounds 0, l, 2 l, ..."""
        return round_ % self.rules.align_every == 0

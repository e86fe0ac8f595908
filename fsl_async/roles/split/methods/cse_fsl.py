"""CSE-FSL: clients train by their own auxiliary loss and send every q-th batch; nothing comes back. Pure."""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.split.methods.base import Decisions


class CseFsl(Decisions):
    """x_a is trained at the clients and averaged with x_c."""

    name: ClassVar[str] = "cse-fsl"
    averaged: ClassVar[tuple[str, ...]] = ("client", "auxiliary")

    def uploads_at(self, step: int) -> bool:
        """Steps 0, q, 2 q, ... of a round."""
        return step % self.rules.upload_every == 0

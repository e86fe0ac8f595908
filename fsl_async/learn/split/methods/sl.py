"""SL, split learning (Gupta and Raskar, arXiv:1810.06060): one client after the other trains the one model with the server.

    for each client in its turn:
        x_c <- x_c of the client before
        for each batch:   z = f_c(x);   S: loss of f_s(z), x_s step, dL/dz back;   x_c step

Only weights are handed over; the optimiser's moments stay with the client whose gradients they come from (docs/adr/0022).
U-shaped, the tail is handed over with x_c, and the labels stay at home.
"""

from typing import Any, ClassVar

from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.methods.base import (
    Crossing,
    Method,
    Position,
    Steps,
    gradient_answer,
    gradient_step,
)
from fsl_async.learn.split.model_parts import ClientPart
from fsl_async.learn.split.server import SplitServer


class SplitLearning(Method):
    """Relay between clients."""

    name: ClassVar[str] = "sl"
    averaged: ClassVar[tuple[str, ...]] = ()
    relay: ClassVar[bool] = True

    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch with the server's gradient."""
        return gradient_step(client, batch)

    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """Step the one x_s."""
        return gradient_answer(server, client, crossing)

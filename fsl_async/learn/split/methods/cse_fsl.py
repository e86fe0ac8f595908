"""CSE-FSL (Mu and Shen, arXiv:2302.05599): clients train by an auxiliary loss alone, the server by every h-th smashed batch.

    client i, step k:   z = f_c(x; x_c,i)
                        if k mod h == 0: send (z, y);   S, on arrival: loss of f_s(z), x_s step; nothing comes back
                        loss of f_a(z; x_a,i): x_c,i and x_a,i step
    end of a round:     x_c <- sum p_i x_c,i;   x_a <- sum p_i x_a,i

An upload is made of the weights before the step that follows it. The server's signal never reaches the clients.
"""

from typing import Any, ClassVar, Literal

from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.methods.base import Activations, Crossing, Method, Position, Steps
from fsl_async.learn.split.model_parts import ClientPart
from fsl_async.learn.split.server import SplitServer
from fsl_async.learn.split.smashed import ModelPartMisused


class CseFsl(Method):
    """Auxiliary models trained at the clients and averaged."""

    name: ClassVar[str] = "cse-fsl"
    auxiliary: ClassVar[Literal["none", "trained", "aligned"]] = "trained"
    averaged: ClassVar[tuple[str, ...]] = ("client", "auxiliary")

    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch through the auxiliary model; upload it when its turn has come."""
        pending = client.forward(batch)
        if at.step % self.settings.upload_every == 0:
            yield Activations(pending.smashed, wants_answer=False)
        return client.auxiliary_step(pending)

    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """Step x_s on what came; there is no answer."""
        if not isinstance(crossing, Activations):
            raise ModelPartMisused(f"nothing answers {type(crossing).__name__} in this method")
        server.half(client).step(crossing.smashed, wants_gradient=False)

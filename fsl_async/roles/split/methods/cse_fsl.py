"""CSE-FSL (Mu and Shen, arXiv:2302.05599).

Clients train by an auxiliary loss, the split server by every q-th batch:

    client i, step k:   z = f_c(x; x_c,i)
                        if k mod q == 0: send (z, y);   S, on arrival: loss of f_s(z), x_s step
                        loss of f_a(z; x_a,i): x_c,i and x_a,i step
    end of a round:     x_c <- sum p_i x_c,i;   x_a <- sum p_i x_a,i

An upload is made with the weights before the step that follows it. No signal of the split server's
reaches clients.
"""

from typing import Any, ClassVar

from fsl_async.roles.split.methods.base import (
    Activations,
    Auxiliary,
    Client,
    Method,
    Position,
    Server,
    Steps,
)


class CseFsl(Method):
    """Auxiliary models trained at the clients and averaged."""

    name: ClassVar[str] = "cse-fsl"
    auxiliary: ClassVar[Auxiliary] = "trained"

    def local_step(self, client: Client, batch: Any, at: Position) -> Steps:
        """Train on one batch through the auxiliary model; upload it when its turn has come."""
        pending = client.forward(batch)
        if self.uploads_at(at.step):
            yield Activations(pending.smashed, wants_answer=False)
        return client.auxiliary_step(pending)

    def train_upload(self, server: Server, client: str, smashed: Any) -> None:
        """Step x_s."""
        server.part(client).step(smashed, wants_gradient=False)

"""FSL-SAGE (Nair et al., ICML 2025, arXiv:2505.23182).

Clients train by auxiliary models that the split server aligns with its gradients:

    client i, step k of round t:
        z = f_c(x; x_c,i)
        if k mod q == 0: send (z, y);   S, on arrival: loss of f_s(z), x_s step, (z, y) to buffer i
        if k == 0 and t mod l == 0:     S aligns x_a,i with its gradients over buffer i and sends it
        loss of f_a(z; x_a,i), x_a,i untouched: x_c,i step
    end of a round:     x_c <- sum p_i x_c,i;   the x_a,i are never averaged

l = 1 is the non-lazy form, l > 1 the lazy one. As published, alignment comes after the first upload
of a round, in round 0 with that one batch; in lockstep client i is aligned to an x_s that the
clients before it have moved in this round. In free mode the client goes on with the old x_a until
the new one is there. The alignment itself is `fsl_async.learn.split.alignment`.
"""

from typing import Any, ClassVar

from fsl_async.roles.split.methods.base import (
    Activations,
    Auxiliary,
    AuxiliaryWanted,
    Client,
    Method,
    Position,
    Server,
    Steps,
)


class FslSage(Method):
    """Auxiliary models aligned by the split server, one per client."""

    name: ClassVar[str] = "fsl-sage"
    auxiliary: ClassVar[Auxiliary] = "aligned"

    def local_step(self, client: Client, batch: Any, at: Position) -> Steps:
        """Train on one batch by the estimated gradient; upload, ask for alignment when due."""
        pending = client.forward(batch)
        if self.uploads_at(at.step):
            yield Activations(pending.smashed, wants_answer=False)
        if self.aligns_at(at):
            vector = yield AuxiliaryWanted()
            if vector is not None:
                client.load(vector, "auxiliary")
        return client.auxiliary_step(pending)

    def train_upload(self, server: Server, client: str, smashed: Any) -> None:
        """Step x_s and keep the batch to align with."""
        alignment = server.alignment(client)
        server.part(client).step(smashed, wants_gradient=False)
        alignment.remember(smashed)

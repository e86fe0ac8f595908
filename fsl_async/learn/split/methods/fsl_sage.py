"""FSL-SAGE (Nair et al., ICML 2025, arXiv:2505.23182): auxiliary models that the server teaches to estimate its gradients.

    client i, step k of round t:
        z = f_c(x; x_c,i)
        if k mod q == 0: send (z, y);   S, on arrival: loss of f_s(z), x_s step, then (z, y) into buffer i
        if k == 0 and t mod l == 0:     S aligns x_a,i with its gradients over buffer i and sends it        (alignment.py)
        loss of f_a(z; x_a,i), x_a,i untouched: x_c,i step
    end of a round:     x_c <- sum p_i x_c,i;   the x_a,i are never averaged

l = 1 is the non-lazy form, l > 1 the lazy one. As published, alignment comes after the first upload of a round, in round 0 with that
one batch; in lockstep client i is aligned to an x_s that the clients before it have moved in this round. In free mode the client goes on
with the old x_a until the new one is there.
"""

from typing import Any, ClassVar, Literal

from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.methods.base import (
    Activations,
    AuxiliaryWanted,
    Crossing,
    Method,
    Position,
    Steps,
)
from fsl_async.learn.split.model_parts import ClientPart
from fsl_async.learn.split.server import SplitServer
from fsl_async.learn.split.smashed import ModelPartMisused


class FslSage(Method):
    """Auxiliary models aligned by the server, one per client."""

    name: ClassVar[str] = "fsl-sage"
    auxiliary: ClassVar[Literal["none", "trained", "aligned"]] = "aligned"

    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch by the estimated gradient; upload and ask for alignment when their turn has come."""
        pending = client.forward(batch)
        if at.step % self.settings.upload_every == 0:
            yield Activations(pending.smashed, wants_answer=False)
        if at.step == 0 and at.round % self.settings.align_every == 0:
            vector = yield AuxiliaryWanted()
            if vector is not None:
                client.load(vector, "auxiliary")
        return client.auxiliary_step(pending)

    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """Step x_s and remember what came, or align; the answer to AuxiliaryWanted is the flat vector of x_a,i."""
        half = server.half(client)
        alignment = server.alignment(client)
        match crossing:
            case Activations(smashed=smashed):
                half.step(smashed, wants_gradient=False)
                alignment.remember(smashed)
                return None
            case AuxiliaryWanted():
                alignment.align(half)
                return alignment.export()
        raise ModelPartMisused(f"nothing answers {type(crossing).__name__} in this method")

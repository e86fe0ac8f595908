"""SplitFed V2 (Thapa et al., AAAI 2022, arXiv:2004.12088): one x_s, stepped by all clients' batches one after the other.

    each batch of client i:   z = f_c(x; x_c,i);   S: loss of f_s(z; x_s), x_s step, dL/dz back;   x_c,i step
    end of a round:           x_c <- sum p_i x_c,i;   x_s goes on

The order of clients is part of the result: x_s sees one client's data after another's. In lockstep it is the order of the clients,
each with all its batches; the paper draws it at random; in free mode it is that of arrival.
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


class SplitFedV2(Method):
    """One server half for all."""

    name: ClassVar[str] = "splitfed-v2"

    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch with the server's gradient."""
        return gradient_step(client, batch)

    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """Step the one x_s."""
        return gradient_answer(server, client, crossing)

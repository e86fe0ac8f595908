"""FedAvg (McMahan et al., AISTATS 2017, arXiv:1602.05629): every client trains a whole model of its own; the models are averaged.

    client i, each batch:   loss of f(x; x_i): x_i step
    end of a round:         x <- sum p_i x_i

Here for comparison, and done right: no two clients share a module. (A simulation whose clients share the object that holds the model's upper
part trains it by one client after the other; that is SplitFed V2 at the price of FedAvg.)
"""

from typing import Any, ClassVar

from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.methods.base import Crossing, Method, Position, Steps
from fsl_async.learn.split.model_parts import ClientPart
from fsl_async.learn.split.server import SplitServer
from fsl_async.learn.split.smashed import ModelPartMisused


class FedAvg(Method):
    """The whole model at the clients."""

    name: ClassVar[str] = "fedavg"
    has_server: ClassVar[bool] = False

    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch; nothing crosses."""
        yield from ()
        return client.auxiliary_step(client.forward(batch))

    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """There is no split server."""
        raise ModelPartMisused("fedavg has no split server")

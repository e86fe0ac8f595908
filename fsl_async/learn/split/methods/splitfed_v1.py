"""SplitFed V1 (Thapa et al., AAAI 2022, arXiv:2004.12088): the server trains one replica of x_s per client and averages them.

    clients in parallel, each batch:   z = f_c(x; x_c,i);   S: loss of f_s(z; x_s,i), x_s,i step, dL/dz back;   x_c,i step
    end of a round:                    x_c <- sum p_i x_c,i;   x_s <- sum p_i x_s,i

Client i and replica i together are client i of FedAvg. With optimisers that work value by value, whose moments stay with client and
replica, the two methods are the same mathematics; clients do not see each other before the round's end, so their order is nothing.
"""

from collections.abc import Mapping
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


class SplitFedV1(Method):
    """A replica per client."""

    name: ClassVar[str] = "splitfed-v1"
    replicas: ClassVar[bool] = True

    def local_step(self, client: ClientPart, batch: Batch, at: Position) -> Steps:
        """Train on one batch with the replica's gradient."""
        return gradient_step(client, batch)

    def serve(self, server: SplitServer, client: str, crossing: Crossing) -> Any:
        """Step the client's replica."""
        return gradient_answer(server, client, crossing)

    def end_round(self, server: SplitServer, shares: Mapping[str, float]) -> None:
        """Average the replicas of those who took part; all replicas start the next round from it."""
        server.average(shares)

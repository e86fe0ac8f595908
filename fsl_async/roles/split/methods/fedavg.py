"""FedAvg (McMahan et al., AISTATS 2017, arXiv:1602.05629): every client trains the full model.

    client i, each batch:   loss of f(x; x_i): x_i step
    end of a round:         x <- sum p_i x_i

Here for comparison, and with a module of its own for each client. (A simulation whose clients share
the object that holds the model's upper part trains it by one client after the other; that is
SplitFed V2 at the price of FedAvg.)
"""

from typing import Any, ClassVar

from fsl_async.roles.split.methods.base import Client, Method, Position, Steps


class FedAvg(Method):
    """The full model at the clients; there is no split server."""

    name: ClassVar[str] = "fedavg"
    has_server: ClassVar[bool] = False

    def local_step(self, client: Client, batch: Any, at: Position) -> Steps:
        """Train on one batch; nothing crosses."""
        yield from ()
        return client.auxiliary_step(client.forward(batch))

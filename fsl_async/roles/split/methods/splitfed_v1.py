"""SplitFed V1 (Thapa et al., AAAI 2022, arXiv:2004.12088).

One replica of x_s per client, averaged as x_c is:

    clients in parallel, each batch:   z = f_c(x; x_c,i)
                                       S: loss of f_s(z; x_s,i), x_s,i step, dL/dz back
                                       x_c,i step
    end of a round:                    x_c <- sum p_i x_c,i;   x_s <- sum p_i x_s,i

Client i and replica i together are client i of FedAvg. With optimizers that work value by value,
whose moments stay with client and replica, the two methods are the same mathematics. Clients do not
see each other before the round's end, so their order does not matter. Averaged are the replicas of
the clients that reported the round as done, before the first upload of a later one.
"""

from typing import ClassVar

from fsl_async.roles.split.methods.base import GradientMethod


class SplitFedV1(GradientMethod):
    """A replica per client."""

    name: ClassVar[str] = "splitfed-v1"
    replicas: ClassVar[bool] = True

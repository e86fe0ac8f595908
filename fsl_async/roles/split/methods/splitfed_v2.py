"""SplitFed V2 (Thapa et al., AAAI 2022, arXiv:2004.12088).

One x_s, stepped by all clients' batches in order:

    each batch of client i:   z = f_c(x; x_c,i)
                              S: loss of f_s(z; x_s), x_s step, dL/dz back
                              x_c,i step
    end of a round:           x_c <- sum p_i x_c,i;   x_s goes on

The order of clients is part of the result: x_s is trained on one client's data after another's. In
lockstep it is the order of the clients, each with all its batches; the paper draws it at random; in
free mode it is that of arrival.
"""

from typing import ClassVar

from fsl_async.roles.split.methods.base import GradientMethod


class SplitFedV2(GradientMethod):
    """One x_s for all."""

    name: ClassVar[str] = "splitfed-v2"

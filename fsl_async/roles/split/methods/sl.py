"""SL, split learning (Gupta and Raskar, arXiv:1810.06060).

One client after the other trains the one model:

    for each client in its turn:
        x_c <- x_c of the client before
        for each batch:   z = f_c(x);   S: loss of f_s(z), x_s step, dL/dz back;   x_c step

Only weights are handed over; the optimizer's moments stay with the client whose gradients they come
from (docs/adr/0022). A round is one client's turn: its number is the version that the turn starts
from. U-shaped (Vepakomma et al., arXiv:1812.00564), the tail is handed over with x_c, and the
labels stay at home.
"""

from typing import ClassVar

from fsl_async.roles.split.methods.base import GradientMethod


class SplitLearning(GradientMethod):
    """Clients in turn, one x_s."""

    name: ClassVar[str] = "sl"
    sequential: ClassVar[bool] = True

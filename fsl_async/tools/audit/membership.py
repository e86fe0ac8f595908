"""Whether a record was in a site's data, and whether a planted text can be guessed. Pure numbers.

The score of membership is how much less a model loses on a record than the base does. By the loss
alone records that are easy look like members; against the base's loss they do not.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@frozen
class Membership:
    """How well members are told from others.

    auc: the share of pairs of a member and another record of which the member scores higher; 0.5 is
    chance. found: the share of members that are found where 1 % of the others are taken for some.
    """

    auc: float
    found: float


def membership(members: Floats, others: Floats) -> Membership:
    """Compare scores of members (M,) and of others (N,), both at least one."""
    ranks = np.searchsorted(np.sort(others), members, "left")
    ties = np.searchsorted(np.sort(others), members, "right") - ranks
    auc = float((ranks + ties / 2).mean() / len(others))
    limit = np.quantile(others, 0.99, method="higher")
    return Membership(auc, float((members > limit).mean()))


def exposure(planted: float, random: Floats) -> float:
    """The exposure of a planted text in bits (Carlini et al., arXiv:1802.08232).

    planted: its loss. random: losses of texts of the same form, (N,). The most is log2(N + 1): then
    no random text is as likely.
    """
    likelier = int((random <= planted).sum())
    return float(np.log2((len(random) + 1) / (likelier + 1)))

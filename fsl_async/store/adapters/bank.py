"""Bank: one bank of directions for sites of all ranks, merged by products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.adapters.base import AdapterRule, Merged
from fsl_async.store.adapters.products import Factors, best, stacked, turned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.adapters.base import Current, Site
    from fsl_async.store.adapters.draws import Draw


class Bank(AdapterRule):
    """A = V^T and B = U S of sum w_k B_k A_k + owed, cut to the rank; the cut is owed.

    Every site holds all directions and trains its first r_k. The others are frozen, and part of the
    site's product: a direction that a site does not train is not shrunk by its weight. All sites
    evaluate the same function. The factorization is that of FlexLoRA, with error feedback.
    """

    name = "bank"
    summary = "hybrid LoRA: SVD of the mean of products; all hold all directions, with feedback"
    source = "FlexLoRA (arXiv:2402.11505), the frozen rest and error feedback (arXiv:1901.09847)"
    by_rounds = True
    unequal_ranks = True
    keeps_tail = True
    changes_basis = True
    merges_products = True
    keeps_owed = True

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """See `AdapterRule.merge`."""
        del scale, draw
        products = _products(current.factors, sites)
        factors, owed = best(stacked(products + current.debts), current.factors.rows)
        return Merged(turned(factors, current.factors), owed=owed)


def _products(held: Factors, sites: Sequence[Site]) -> list[tuple[float, Factors]]:
    """Return the sites' products, with their weights.

    Rows that a site has not moved are common to all such sites, and are taken once: a merge costs
    what sites have trained, whatever the rank of the bank.
    """
    shares = np.zeros((held.rows, 1))
    products = []
    for site in sites:
        a, b = site.factors.a, site.factors.b
        still = np.all(a == held.a, axis=1) & np.all(b == held.b, axis=1)
        shares[still] += site.weight
        products.append((site.weight, Factors(a[~still], b[~still])))
    return [(1.0, Factors(held.a, shares * held.b)), *products]

"""FlexLoRA: the SVD of the mean of products of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.store.adapters.base import AdapterRule, Merged
from fsl_async.store.adapters.products import best, stacked, turned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.adapters.base import Current, Site
    from fsl_async.store.adapters.draws import Draw


class FlexLoRA(AdapterRule):
    """A = V^T and B = U S of sum w_k B_k A_k, cut to the run's rank; a site holds r_k rows.

    Directions above a site's rank shrink by its weight in every round: the site does not hold them.
    """

    name = "flexlora"
    summary = "SVD of the mean of products; a site gets its first rows"
    source = "Bai et al. 2024, arXiv:2402.11505; HLoRA, arXiv:2503.00813"
    by_rounds = True
    unequal_ranks = True
    changes_basis = True
    merges_products = True

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """See `AdapterRule.merge`."""
        del scale, draw
        products = [(site.weight, site.held) for site in sites]
        # Where the sites' rows do not fill the rank, the others are in the span of the old ones.
        spare = [(0.0, current.factors)]
        factors, _ = best(stacked(products + current.debts + spare), current.factors.rows)
        return Merged(turned(factors, current.factors))

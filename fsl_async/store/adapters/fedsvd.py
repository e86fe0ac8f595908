"""FedSVD: B is trained and averaged, and the product is factored anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.store.adapters.base import AdapterRule, Merged
from fsl_async.store.adapters.products import best, stacked, turned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.adapters.base import Current, Site
    from fsl_async.store.adapters.draws import Draw


class FedSVD(AdapterRule):
    """Sites train B; from the SVD of (sum w_k B_k) A the next factors are A = V^T and B = U S.

    Exact, as ffa, and A follows what was learned. `owed` is rounding and coding error only.
    """

    name = "fedsvd"
    summary = "mean of B, then A and B from the SVD of their product"
    source = "Lee et al. 2025, arXiv:2505.12805"
    by_rounds = True
    changes_basis = True
    merges_products = True
    keeps_owed = True
    is_linear = True

    def trains_a(self, version: int) -> bool:
        """Never."""
        del version
        return False

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """See `AdapterRule.merge`."""
        del scale, draw
        products = [(site.weight, site.factors) for site in sites]
        factors, owed = best(stacked(products + current.debts), current.factors.rows)
        return Merged(turned(factors, current.factors), owed=owed)

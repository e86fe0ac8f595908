"""FedEx-LoRA: the mean of both factors, and the frozen weight gets what that misses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.store.adapters.base import AdapterRule, Merged, mean_of
from fsl_async.store.adapters.products import stacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.adapters.base import Current, Site
    from fsl_async.store.adapters.draws import Draw


class FedEx(AdapterRule):
    """A, B as in fedit; patch += c (sum w_k B_k A_k - B A). Exact; the patch is dense."""

    name = "fedex"
    summary = "mean of A and of B; a dense patch of the base gets the difference to exact"
    source = "Singhal et al. 2024, arXiv:2410.09432"
    by_rounds = True
    has_patch = True
    merges_products = True

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """See `AdapterRule.merge`."""
        del draw
        factors = mean_of(sites, current)
        products = [(scale * site.weight, site.factors) for site in sites]
        debts = [(scale * weight, debt) for weight, debt in current.debts]
        return Merged(factors, patch=stacked([*products, *debts, (-scale, factors)]))

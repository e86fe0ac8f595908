"""FLoRA: the frozen weight gets the whole sum, and the adapters start anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.adapters.base import AdapterRule, Merged
from fsl_async.store.adapters.products import Factors, stacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.adapters.base import Current, Site
    from fsl_async.store.adapters.draws import Draw


class FLoRA(AdapterRule):
    """patch += c sum w_k B_k A_k; A is drawn again, and B = 0. Exact; the patch is dense."""

    name = "flora"
    summary = "a dense patch of the base gets the mean of products; adapters start anew"
    source = "Wang et al. 2024, arXiv:2409.05976"
    by_rounds = True
    unequal_ranks = True
    changes_basis = True
    has_patch = True
    merges_products = True

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """See `AdapterRule.merge`."""
        products = [(scale * site.weight, site.held) for site in sites]
        debts = [(scale * weight, debt) for weight, debt in current.debts]
        old = current.factors
        drawn = draw.a(*old.a.shape).astype(np.float64)
        return Merged(Factors(drawn, np.zeros_like(old.b)), patch=stacked(products + debts))

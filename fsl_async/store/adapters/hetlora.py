"""HetLoRA: factors of several ranks, padded with zeros and weighted by their products' norms."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.adapters.base import AdapterRule, Merged, Site, mean_of
from fsl_async.store.adapters.products import Factors, norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.adapters.base import Current
    from fsl_async.store.adapters.draws import Draw

MOST_OF_MEDIAN = 1.5
"""Limit of a norm, x the median of the sites' norms: else one large norm has all of the weight."""


class HetLoRA(AdapterRule):
    """Mean of zero-padded factors, w_k ~ w_k norm(B_k A_k); a site holds its first r_k rows.

    Its paper also lets sites prune their ranks, which is left out, and does not limit norms.
    """

    name = "hetlora"
    summary = "mean of zero-padded A and B, weighted by the norm of the product"
    source = "Cho et al. 2024, arXiv:2401.06432"
    by_rounds = True
    unequal_ranks = True
    merges_products = True

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """See `AdapterRule.merge`. Where all products are zero, the weights are those given."""
        del scale, draw
        norms = [norm(site.held) for site in sites]
        most = MOST_OF_MEDIAN * (median(norms) if len(norms) > 2 else min(norms))
        weights = [site.weight * min(one, most) for site, one in zip(sites, norms, strict=True)]
        total = math.fsum(weights)
        padded = [
            Site(weight / total if total else site.weight, site.rank, _padded(site))
            for weight, site in zip(weights, sites, strict=True)
        ]
        return Merged(mean_of(padded, current))


def _padded(site: Site) -> Factors:
    made = Factors(np.zeros_like(site.factors.a), np.zeros_like(site.factors.b))
    made.a[: site.rank], made.b[: site.rank] = site.held.a, site.held.b
    return made

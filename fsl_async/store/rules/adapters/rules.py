"""The built-in rules of federated LoRA. Pure, module by module; see `base`."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.rules.adapters.base import AdapterRule, Merged, Site, mean_of
from fsl_async.store.rules.adapters.products import Factors, best, norm, stacked, turned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.rules.adapters.base import Current
    from fsl_async.store.rules.adapters.draws import Draw

MOST_OF_MEDIAN = 1.5
"""Limit of a norm, x the median of the sites' norms: else one large norm has all of the weight."""


class FedIT(AdapterRule):
    """A = sum w_k A_k, B = sum w_k B_k. The product is not the mean of the products."""

    name = "fedit"
    summary = "mean of A and mean of B"
    source = "Zhang et al. 2023, arXiv:2305.05644"
    is_linear = True


class FFA(AdapterRule):
    """B = sum w_k B_k; A is that of the run's seed. Exact: the product is linear in B."""

    name = "ffa"
    summary = "A is drawn once and never sent; mean of B"
    source = "Sun et al. 2024, arXiv:2403.12313"
    exchanges_a = False
    is_linear = True

    def trains_a(self, version: int) -> bool:
        """Never."""
        del version
        return False


class RoLoRA(AdapterRule):
    """From even versions sites train B, from odd ones A. Exact: the other factor is common."""

    name = "rolora"
    summary = "rounds train B and A in turns; mean of what was trained"
    source = "Chen et al. 2025, arXiv:2502.01755"
    by_rounds = True
    is_linear = True

    def trains_a(self, version: int) -> bool:
        """Whether sites train A: from odd versions."""
        return version % 2 == 1

    def trains_b(self, version: int) -> bool:
        """Whether sites train B: from even versions."""
        return version % 2 == 0


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


RULES: dict[str, type[AdapterRule]] = {
    rule.name: rule for rule in (FedIT, FFA, RoLoRA, FedSVD, FedEx, FLoRA, HetLoRA, FlexLoRA, Bank)
}


def adapter_rule_named(name: str) -> AdapterRule:
    """Return the rule called `name`. ValueError lists the rules."""
    if name not in RULES:
        raise ValueError(f"no adapter rule is called {name!r}; there are {', '.join(RULES)}")
    return RULES[name]()

"""Base classes of the rules of federated LoRA. Pure, module by module.

An adapted layer adds c B A to its weight W0. Sites train factors A_k, B_k from those of the current
version, and what each of them has learned is the product c B_k A_k. Rules whose factors may be
averaged one by one (fedit, ffa, rolora) are the weighted mean of flat vectors, as any other deltas:
staleness, momentum and robust rules work. The others (`merges_products`) get a module's factors of
all sites at once, and make the next version's.

Error feedback. A version reaches clients coded, so what the parameter server wants and what clients
hold differ by `Current.unsent`, factor by factor. After a change of basis that belongs to a basis
that is no more. So product rules add, to the products of the sites, the difference of the products:

    debt = (B + r_B) (A + r_A) - B A + owed

`owed` is the product that earlier merges could not fit into the rank. Nothing is lost, and what
coding adds does not grow from version to version.

To add a rule for one run: docs/OWN_RULES.md. For all: a class in `rules` and in
`RULES` there, and its name in `AdapterRuleName` (`fsl_async.config.settings_tuning`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import frozen

from fsl_async.store.rules.adapters.products import Factors, difference, norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.store.rules.adapters.draws import Draw


@frozen(eq=False)
class Current:
    """A module in the version that the sites trained from; factors have the run's rank.

    factors: as clients hold them. unsent: the coding error that the next version sends, wanted
    minus held; None: nothing was lost. owed: factors of the product that did not fit into the rank;
    None: the rule keeps none.
    """

    factors: Factors
    unsent: Factors | None = None
    owed: Factors | None = None

    @property
    def wanted(self) -> Factors:
        """The factors that clients would hold if nothing were lost in coding."""
        return self.factors if self.unsent is None else self.factors + self.unsent

    @property
    def debts(self) -> list[tuple[float, Factors]]:
        """Products, with weights, that clients are to get beside what sites have learned."""
        found = []
        if self.unsent is not None:
            found.append((1.0, difference(self.wanted, self.factors)))
        if self.owed is not None:
            found.append((1.0, self.owed))
        return found


@frozen(eq=False)
class Site:
    """The factors that a site trained for a module.

    weight: the weights of all sites sum to 1. rank: rows that the site trains. factors: of the
    run's rank; rows that the site does not train are those of the current version.
    """

    weight: float
    rank: int
    factors: Factors

    @property
    def held(self) -> Factors:
        """The rows that it holds, where a site holds only those that it trains."""
        return self.factors.first(self.rank)


@frozen(eq=False)
class Merged:
    """A module in the next version.

    factors: with the run's rank, before coding. patch: factors of what the patch grows by, scale
    included. owed: as in `Current`, of the next version.
    """

    factors: Factors
    patch: Factors | None = None
    owed: Factors | None = None


class AdapterRule:
    """A rule. It has no state: what a merge depends on are its arguments."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: what the rule does."""
    source: ClassVar[str]
    """The paper that it is from."""
    exchanges_a: ClassVar[bool] = True
    """Whether factors A travel. If not, they are those of the run's seed for ever."""
    by_rounds: ClassVar[bool] = False
    """Whether every site must start a round from the newest version: stale deltas do not fit."""
    unequal_ranks: ClassVar[bool] = False
    """Whether a site may train less than the run's rank."""
    keeps_tail: ClassVar[bool] = False
    """Whether rows that a site does not train take part in its forward pass."""
    changes_basis: ClassVar[bool] = False
    """Whether a version's factors are in a new basis, so that moments of optimizers are void."""
    has_patch: ClassVar[bool] = False
    """Whether versions change the frozen weight too, by a tensor `.patch` of each module."""
    merges_products: ClassVar[bool] = False
    """Whether merging needs the factors of a module together. If not, it is the weighted mean."""
    keeps_owed: ClassVar[bool] = False
    """Whether what does not fit into the rank is kept for the next version."""
    is_linear: ClassVar[bool] = False
    """Whether a sum of deltas is all that the server needs of them, as a secure sum gives."""

    def trains_a(self, version: int) -> bool:
        """Whether sites train A in a round from version `version`."""
        del version
        return True

    def trains_b(self, version: int) -> bool:
        """Whether sites train B in a round from version `version`."""
        del version
        return True

    def site_norm(self, site: Site, current: Current) -> float:
        """Return by how much a site changed a module: norm of the difference of products."""
        rows = site.factors.rows if self.keeps_tail else site.rank
        change = difference(site.factors.first(rows), current.factors.first(rows))
        return norm(change)

    def merge(self, current: Current, sites: Sequence[Site], scale: float, draw: Draw) -> Merged:
        """Return a module of the next version.

        sites: at least one, in an order that does not depend on when their deltas came. scale: of
        the product. draw: for rules that start a module anew.

        The weighted mean of both factors, in float64, unless a rule has its own way.
        """
        del scale, draw
        return Merged(mean_of(sites, current))


def mean_of(sites: Sequence[Site], current: Current) -> Factors:
    """Return the weighted mean of the sites' factors, and what coding has kept back so far."""
    total = Factors(*(np.zeros_like(one) for one in (current.factors.a, current.factors.b)))
    for site in sites:
        total = total + Factors(site.weight * site.factors.a, site.weight * site.factors.b)
    return total if current.unsent is None else total + current.unsent

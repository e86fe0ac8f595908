"""A site's own choices in a run that tunes a base model. Pure.

The parameter server fixes rank, rule and objective of the run; where the base is on a site's disk,
and how much of it the site trains, is up to the site (`--base`, `--rank`, `--layers`,
`--order`), as are the columns of its records (`--columns`).
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import TaskError

Order = Literal["first", "zeroth"]


@frozen
class SiteTuning:
    """What a client's command line chooses.

    base: folder or file of the base model. rank: of its adapters; 0: the run's. order: of its
    steps; None: by the run's method. layers: numbers of the blocks that it trains, like "0-2,5";
    empty: all. columns: of its records, like "text=BODY"; empty: by their usual names.
    """

    base: str = ""
    rank: int = 0
    order: Order | None = None
    layers: str = ""
    columns: str = ""

    def rank_in(self, tune: TuneConfig, *, unequal: bool) -> int:
        """The rank of this site's adapters. TaskError: the run cannot have it.

        unequal: whether the run's rule merges adapters of several ranks.
        """
        most = tune.adapter_rank
        if not self.rank or self.rank == most:
            return most
        if self.rank > most:
            raise TaskError(f"--rank {self.rank}: the run's adapters have rank {most} (tune.rank)")
        if not unequal:
            raise TaskError(
                f"--rank {self.rank}: all sites of a run with tune.rule = {tune.rule} have rank"
                f" {most}; ranks of its own need tune.rule = bank"
            )
        return self.rank

    def is_zeroth(self, tune: TuneConfig) -> bool:
        """Whether this site estimates gradients from losses."""
        return tune.method == "zeroth" or self.order == "zeroth"

"""Runs that compare rules of federated LoRA on a base model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from fsl_async.config.recipes import with_implied
from fsl_async.config.settings_tuning import RANK, AdapterRuleName
from fsl_async.config.site_policy import Order
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import METHODS as SPLIT
from fsl_async.store.rules.adapters import RULES
from fsl_async.tools.compare.choices import Choices, Run, words_of

ZEROTH = "zeroth"
METHODS: Mapping[str, Mapping[str, str]] = {
    **{rule: {"tune.method": "lora", "tune.rule": rule} for rule in RULES},
    ZEROTH: {"tune.method": "zeroth"},
}
"""Settings of each method."""

POOLED, LOCAL = "pooled", "local"
"""One process on all records; each site alone on its own."""
CENTRAL: AdapterRuleName = "fedit"
"""The rule of training alone: both factors train, in one basis."""


@frozen(kw_only=True)
class TuningChoices(Choices):
    """A comparison of rules of federated LoRA.

    data: records of each site. base: folder or file of the model. ranks: of each site, where a
    method allows that; empty: the run's for all. orders: of each site's steps; empty: by the
    method. layers: numbers of the blocks that all sites train, like "3-5"; empty: all. columns:
    those of all records, as `--columns` names them. held_out: records that versions are scored on;
    "": those that sites hold out, together.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "tune.method": "--methods",
        "tune.rule": "--methods",
        "tune.base": "--base",
        "data.path": "--data",
        "run.rounds": "--rounds",
        "run.seed": "--seed or --seeds",
        "train.batch": "--batch",
        "train.learning_rate": "--learning-rate",
        "sync.clients": "the number of --data",
        "sync.min_clients": "the number of --data",
        "sync.trigger": "compare: all rules train by rounds",
    }

    base: str
    ranks: tuple[int, ...] = ()
    orders: tuple[Order, ...] = ()
    layers: str = ""
    columns: str = ""
    held_out: str = ""

    def __attrs_post_init__(self) -> None:
        for option, given in (("ranks", self.ranks), ("orders", self.orders)):
            if given and len(given) != len(self.data):
                raise UsageError(
                    f"--{option}: {len(given)} {option}, and {len(self.data)} sites: give one for"
                    " each --data"
                )
        if self.orders and ZEROTH in self.methods:
            raise UsageError("--orders: all sites of the method zeroth are of zeroth order")
        if self.ranks and not any(map(is_unequal, self.methods)):
            known = ", ".join(name for name, rule in RULES.items() if rule.unequal_ranks)
            raise UsageError(f"--ranks: none of the methods allows unequal ranks; {known} do")
        rank = self.run(self.methods[0]).config.tune.adapter_rank
        if self.ranks and not 1 <= min(self.ranks) <= max(self.ranks) <= rank:
            raise UsageError(
                f"--ranks: between 1 and the run's rank, which is {rank} (--set tune.rank=N)"
            )
        self.check_target()

    @property
    def names(self) -> tuple[str, ...]:
        """The clients, in the order of their data."""
        return tuple(f"client-{number}" for number in range(1, len(self.data) + 1))

    @property
    def by_loss(self) -> bool:
        """Whether there is no accuracy, so that the target is a loss."""
        return self.run(self.methods[0]).config.tune.objective == "lm"

    @property
    def steps(self) -> int:
        """Steps of a site in the whole run: by gradients, unless all methods are zeroth order."""
        tune = self.run(self.methods[0]).config.tune
        is_zeroth = set(self.methods) == {ZEROTH}
        return self.rounds * (tune.zo_steps if is_zeroth else tune.steps)

    def run(self, method: str) -> Run:
        """Return the run of a method. Raises UsageError and ConfigError in one line."""
        sites = len(self.data)
        usual: dict[str, Any] = {
            "tune.rank": max(self.ranks, default=RANK),
            "train.batch": 16,
            "train.evaluate_share": 0.0,
        }
        if self.held_out:  # nothing else needs to be kept back
            usual["data.holdout"] = 0.0
        wanted = {
            **METHODS[method],
            "run.name": f"compare-{method}",
            "run.rounds": self.rounds,
            "sync.trigger": "rounds",
            "sync.clients": sites,
            "sync.min_clients": sites,
        }
        run = Run(method=method, sets=self.all_sets(usual, wanted), clients={})
        with_implied(run.config)
        ranks = (run.config.tune.adapter_rank,) * sites
        if self.ranks and is_unequal(method):
            ranks = self.ranks
        orders = self.orders or (None,) * sites
        common = {"base": self.base, "layers": self.layers, "columns": self.columns}
        clients = {
            name: words_of({"data": data, **common, "rank": rank, "order": order})
            for name, data, rank, order in zip(self.names, self.data, ranks, orders, strict=True)
        }
        return Run(method=method, sets=run.sets, clients=clients, ranks=ranks)


def is_unequal(method: str) -> bool:
    """Whether a method allows sites of unequal ranks."""
    rule = METHODS[method].get("tune.rule")
    return rule is not None and RULES[rule].unequal_ranks


def is_tuning(text: str) -> bool:
    """Whether "fedit,bank" names methods of tuning. Raises UsageError where some split a model."""
    names = [part.strip().lower() for part in text.split(",")]
    tuning = [name for name in names if name in METHODS]
    split = [name for name in names if name in SPLIT]
    if tuning and split:
        raise UsageError(
            f"--methods: {tuning[0]} tunes a base model, and {split[0]} trains a model anew:"
            " compare them apart"
        )
    return bool(tuning)

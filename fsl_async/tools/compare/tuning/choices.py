"""What is compared where sites tune a base model, and the configuration of a run. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from fsl_async.config.implied import with_implied
from fsl_async.config.load import load
from fsl_async.config.settings import Config
from fsl_async.config.settings_tuning import RANK
from fsl_async.config.site_tuning import Order
from fsl_async.errors import UsageError
from fsl_async.learn.data.facts import described
from fsl_async.roles.split.methods import METHODS as SPLIT
from fsl_async.store.adapters import RULES

ZEROTH = "zeroth"
METHODS: Mapping[str, Mapping[str, str]] = {
    **{rule: {"tune.method": "lora", "tune.rule": rule} for rule in RULES},
    ZEROTH: {"tune.method": "zeroth"},
}
"""Settings of each method."""

POOLED, LOCAL = "pooled", "local"
"""One process on all records; each site alone on its own."""

_OWN = {
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
"""Settings that the command sets, and by what."""


@frozen(kw_only=True)
class TuningChoices:
    """One comparison. Every run has all of it in common but its method.

    data: records of each site. ranks: of each site, where a method allows that; empty: the run's
    for all. orders: of each site's steps; empty: by the method. layers: numbers of the blocks that
    all sites train, like "3-5"; empty: all. columns: those of all records, as `--columns` names
    them. held_out: records that versions are scored on; "": those that sites hold out, together.
    score_every: rounds; the last one is scored anyway. target_accuracy, target_loss: from which on,
    with lm down to which, a method has reached its target; 0: none. sets: settings of the run,
    TABLE.KEY=VALUE.
    """

    methods: tuple[str, ...]
    base: str
    data: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    orders: tuple[Order, ...] = ()
    layers: str = ""
    columns: str = ""
    held_out: str = ""
    rounds: int = 10
    score_every: int = 1
    target_accuracy: float = 0.0
    target_loss: float = 0.0
    stops_at_target: bool = False
    batch: int = 16
    learning_rate: float = 1e-3
    seed: int = 0
    sets: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not 0 < self.learning_rate <= 10:
            raise UsageError(f"--learning-rate {self.learning_rate:g}: above 0, at most 10")
        for one in self.sets:
            key = one.partition("=")[0].strip()
            if key in _OWN:
                raise UsageError(f"--set {key}: is set by {_OWN[key]}")
        self._check_sites()
        self._check_target()

    def _check_sites(self) -> None:
        for option, given in (("ranks", self.ranks), ("orders", self.orders)):
            if given and len(given) != len(self.data):
                raise UsageError(
                    f"--{option}: {len(given)} {option}, and {len(self.data)} sites: give one for"
                    " each --data"
                )
        if self.orders and ZEROTH in self.methods:
            raise UsageError("--orders: all sites of the method zeroth are of zeroth order")
        if self.ranks and not any(map(self.is_unequal, self.methods)):
            known = ", ".join(name for name, rule in RULES.items() if rule.unequal_ranks)
            raise UsageError(f"--ranks: none of the methods allows unequal ranks; {known} do")
        rank = self.config(self.methods[0]).tune.adapter_rank
        if self.ranks and not 1 <= min(self.ranks) <= max(self.ranks) <= rank:
            raise UsageError(
                f"--ranks: between 1 and the run's rank, which is {rank} (--set tune.rank=N)"
            )

    def _check_target(self) -> None:
        if not 0 <= self.target_accuracy <= 1:
            raise UsageError(
                f"--target-accuracy {self.target_accuracy:g}:"
                " a share of right answers, above 0 and at most 1"
            )
        wrong = "accuracy" if self.by_loss else "loss"
        if (self.target_accuracy if self.by_loss else self.target_loss) > 0:
            right = "loss" if self.by_loss else "accuracy"
            raise UsageError(f"--target-{wrong}: this objective has --target-{right} instead")
        if self.stops_at_target and not self.target:
            raise UsageError("--stop-at-target: there is no target")

    @property
    def names(self) -> tuple[str, ...]:
        """The clients, in the order of their data."""
        return tuple(f"client-{number}" for number in range(1, len(self.data) + 1))

    def turns(self, method: str) -> int:
        """Versions of one round."""
        del method
        return 1

    def is_scored(self, version: int) -> bool:
        """Whether a version is scored."""
        return version > 0 and (version % self.score_every == 0 or version == self.rounds)

    def order_of(self, site: int) -> Order | None:
        """The order of a site's steps; None: by the method."""
        return self.orders[site] if self.orders else None

    @property
    def steps(self) -> int:
        """Steps of a site in the whole run: by gradients, unless all methods are zeroth order."""
        tune = self.config(self.methods[0]).tune
        is_zeroth = set(self.methods) == {ZEROTH}
        return self.rounds * (tune.zo_steps if is_zeroth else tune.steps)

    def is_unequal(self, method: str) -> bool:
        """Whether the method allows sites of unequal ranks."""
        rule = METHODS[method].get("tune.rule")
        return rule is not None and RULES[rule].unequal_ranks

    def ranks_of(self, method: str) -> tuple[int, ...]:
        """The rank of each site's adapters."""
        if self.ranks and method in METHODS and self.is_unequal(method):
            return self.ranks
        return (self.config(self.methods[0]).tune.adapter_rank,) * len(self.data)

    @property
    def by_loss(self) -> bool:
        """Whether there is no accuracy, so that the target is a loss."""
        return self.config(self.methods[0]).tune.objective == "lm"

    def config(self, method: str) -> Config:
        """The configuration of a method's run. Raises ConfigError in one line."""
        sites = len(self.data)
        usual: dict[str, Any] = {
            "run.name": f"compare-{method}",
            "tune.rank": max(self.ranks, default=RANK),
            "sync.quorum": 1.0,
            "session.heartbeat_every_s": 1.0,
            "session.expire_after_s": 30.0,
            "store.keep_versions": 1,
            "train.threads": 1,
            "train.evaluate_share": 0.0,
        }
        if self.held_out:  # nothing else needs to be kept back
            usual["data.holdout"] = 0.0
        wanted = {
            **METHODS[method],
            "run.rounds": self.rounds,
            "run.seed": self.seed,
            "listen.address": "tcp://127.0.0.1:0",
            "sync.trigger": "rounds",
            "sync.clients": sites,
            "sync.min_clients": sites,
            "train.batch": self.batch,
            "train.learning_rate": self.learning_rate,
        }
        sets = [*_texts(usual), *self.sets, *_texts(wanted)]
        found = described(load(None, sets, {key: f"--set {key}" for key in _keys(self.sets)}))
        with_implied(found)
        return found

    @property
    def target(self) -> float:
        """The target of this objective."""
        return self.target_loss if self.by_loss else self.target_accuracy

    def as_dict(self) -> dict[str, Any]:
        """For rows, and for nodes that are processes of their own."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> TuningChoices:
        """Undo `as_dict`, which may have been through JSON."""
        lists = {name: tuple(one) for name, one in found.items() if isinstance(one, list | tuple)}
        return cls(**{**found, **lists})


def _texts(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def _keys(sets: tuple[str, ...]) -> list[str]:
    return [one.partition("=")[0].strip() for one in sets]


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


def parse_methods(text: str) -> tuple[str, ...]:
    """Read "fedit,bank": names in the order given, each once. Raises UsageError."""
    found: list[str] = []
    for name in filter(None, (part.strip().lower() for part in text.split(","))):
        if name not in METHODS:
            raise UsageError(f"--methods: {name[:80]!r} is unknown; known: {', '.join(METHODS)}")
        if name not in found:
            found.append(name)
    if not found:
        raise UsageError(f"--methods: name at least one of {', '.join(METHODS)}")
    return tuple(found)


def parse_orders(text: str) -> tuple[Order, ...]:
    """Read "first,zeroth". Raises UsageError."""
    orders: dict[str, Order] = {"first": "first", "zeroth": "zeroth"}
    names = [part.strip().lower() for part in text.split(",")] if text else []
    for name in names:
        if name not in orders:
            raise UsageError(f"--orders: {name[:80]!r} is no order; known: first, zeroth")
    return tuple(orders[name] for name in names)


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Read "2,4,8": natural numbers. Raises UsageError."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(not 0 <= one < 1 << 62 for one in found):
        raise UsageError(f"{option} {text[:80]!r}: write numbers like 2,4,8")
    return found

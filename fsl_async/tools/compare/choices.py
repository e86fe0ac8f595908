"""Defines a comparison: runs with a label, settings and clients. Imports no torch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from attrs import frozen

from fsl_async.config.load import load, parse_override
from fsl_async.config.presets import PUBLISHED
from fsl_async.config.settings import Config
from fsl_async.errors import UsageError

COMMON: Mapping[str, Any] = {
    "session.heartbeat_every_s": 1.0,
    "session.expire_after_s": 30.0,
    "store.keep_versions": 1,
    "train.learning_rate": 1e-3,
    "train.threads": 1,
}
"""Settings of all runs, unless an option, --set or a preset has others."""

SPLIT_SETTINGS: Mapping[str, str] = {
    "split.auxiliary": "--auxiliary",
    "split.optimizer": "--optimizer",
    "split.up": "--format",
    "split.down": "--format",
    "train.batch": "--batch",
    "train.learning_rate": "--learning-rate",
    "train.weight_decay": "--weight-decay",
}
"""The option of the command that gives a setting of split learning as it is."""
SPLIT_ROWS = (
    "model.sizes", "split.cut", "split.samples", "split.upload_every", "split.align_every",
    "split.align_passes", "split.align_rate", "split.buffer_samples", "split.mode",
    "split.in_flight",
)  # fmt: skip
"""Settings of split learning that rows have, too."""
OF_NODES = frozenset({"listen.address", "listen.insecure", "split.listen", "split.server"})
"""Settings that depend on where the nodes run."""
SPLIT_DEFAULTS: Mapping[str, Any] = {
    "split.samples": 0,
    "split.align_every": 2,
    "split.align_rate": 3e-3,
    "train.batch": 32,
    "train.weight_decay": 1e-4,
}
"""Those that differ from a run's."""


@frozen(kw_only=True)
class Run:
    """One run of a comparison.

    method: its label. sets: its settings, TABLE.KEY=VALUE. clients: by name, in the order of
    shards, the options of its command line. turns: versions of a round. ranks: of the sites'
    adapters; empty: none.
    """

    method: str
    sets: tuple[str, ...]
    clients: Mapping[str, Sequence[str]]
    turns: int = 1
    ranks: tuple[int, ...] = ()

    @property
    def config(self) -> Config:
        """The configuration. Raises ConfigError and DataError in one line."""
        from fsl_async.learn.data.facts import described

        return described(load(None, self.sets))


@frozen(kw_only=True)
class Choices(ABC):
    """The choices that all runs of a comparison share, apart from the method.

    data: paths. score_every: rounds from one score to the next; the last one is scored anyway;
    0: none is. target_accuracy, target_loss: from which on, or down to which where there is no
    accuracy, a method has reached its target; 0: none. settings: values that options of the command
    have given, by key. sets: further settings, TABLE.KEY=VALUE.
    """

    OPTIONS: ClassVar[Mapping[str, str]]
    """The option of the command by the setting that it makes."""
    ROWS: ClassVar[Sequence[str]] = ()
    """Further settings that rows have."""

    methods: tuple[str, ...]
    data: tuple[str, ...]
    rounds: int = 10
    score_every: int = 1
    target_accuracy: float = 0.0
    target_loss: float = 0.0
    stops_at_target: bool = False
    seed: int = 0
    settings: Mapping[str, Any] = {}
    sets: tuple[str, ...] = ()

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The clients, in the order of their parts of the data."""

    @property
    def by_loss(self) -> bool:
        """Whether there is no accuracy, so that the target is a loss."""
        return False

    @property
    def target(self) -> float:
        """The accuracy or loss that is the target; 0: there is none."""
        return self.target_loss if self.by_loss else self.target_accuracy

    def check_target(self) -> None:
        """Raise UsageError for a target that cannot be reached."""
        wrong, right = ("accuracy", "loss") if self.by_loss else ("loss", "accuracy")
        if self.target_accuracy if self.by_loss else self.target_loss:
            raise UsageError(f"--target-{wrong}: this objective has --target-{right} instead")
        if self.stops_at_target and not self.target:
            raise UsageError("--stop-at-target: there is no target")

    @abstractmethod
    def run(self, method: str) -> Run:
        """Return the run of a method. Raises UsageError and ConfigError in one line."""

    def used(self, run: Run) -> dict[str, Any]:
        """Return all choices by name, for rows; settings with the values that the run has."""
        found, config = attrs.asdict(self), run.config
        del found["settings"]
        for key in (*self.OPTIONS, *self.ROWS):
            table, _, name = key.partition(".")
            found.setdefault(name, getattr(getattr(config, table), name))
        return found

    def all_sets(self, usual: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a run's settings: usual ones, those of --set, and those that options decide.

        A preset among --set replaces the usual ones. Raises UsageError for a --set of a setting
        that an option or `compare` decides, and ConfigError for one that is none.
        """
        wanted = {**wanted, "run.seed": self.seed}
        given = dict(map(parse_override, self.sets))
        for key in given:
            if key in wanted or key in self.OPTIONS or key in OF_NODES:
                raise UsageError(f"--set {key}: is set by {self.OPTIONS.get(key, 'compare')}")
        preset = PUBLISHED.get(str(given.get("split.preset")), {})
        usual = {key: value for key, value in {**COMMON, **usual}.items() if key not in preset}
        options = [f"{key}={value}" for key, value in self.settings.items()]
        found = (*_texts(usual), *self.sets, *options, *_texts(wanted))
        load(None, found, {**self.OPTIONS, **{key: f"--set {key}" for key in given}})
        return found


def words_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return options as words of a command line, without those that have no value."""
    given = {name: value for name, value in options.items() if value}
    return tuple(word for name, value in given.items() for word in (f"--{name}", str(value)))


def is_scored(version: int, every: int, rounds: int, turns: int) -> bool:
    """Whether a version is scored: one at the end of a round, every so-manieth and the last."""
    made, rest = divmod(version, turns)
    if version < 1 or rest or not every:
        return False
    return made % every == 0 or made == rounds


def _texts(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def parse_names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Read "sl,fedavg": names in lower case, in the order given.

    Raises UsageError for a name that is not known, and where there is none.
    """
    known = tuple(known)
    found = tuple(filter(None, (part.strip().lower() for part in text.split(","))))
    for name in found:
        if name not in known:
            raise UsageError(f"{option}: {name[:80]!r} is unknown; known: {', '.join(known)}")
    if not found:
        raise UsageError(f"{option}: name at least one of {', '.join(known)}")
    return found


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Read "2,4,8": natural numbers. Raises UsageError."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(not 0 <= one < 1 << 62 for one in found):
        raise UsageError(f"{option} {text[:80]!r}: write numbers like 2,4,8")
    return found

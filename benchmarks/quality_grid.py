"""The rows of `quality.py`: what each of them measures, and which of them there are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from fsl_codecs import CodecSpec

BUDGET_STEPS = 800
"""Steps of BATCH sequences in all, split over the clients. Divisible by 4 clients x 100 steps."""
BATCH = 4
LEARNING_RATE = 2e-3
SEEDS = (0, 1, 2)


@frozen
class Spec:
    """What a row measures. `steps_per_round`: one entry a client; empty: no synchronization."""

    seed: int
    steps_per_round: tuple[int, ...] = ()
    format: str = ""
    optimizer: str = "nesterov"
    outer_learning_rate: float = 0.7
    weighting: str = "tokens"
    batch: int = BATCH
    learning_rate: float = LEARNING_RATE
    budget_steps: int = BUDGET_STEPS
    preset: str = "0.5m"
    outer_momentum: float = 0.9
    sharding: str = "disjoint"
    step_log2: int = 14
    feedback_up: bool = False

    @property
    def codec(self) -> CodecSpec:
        """How weights travel, both ways."""
        return CodecSpec(format=self.format, step_log2=self.step_log2)

    @property
    def clients(self) -> int:
        """The number of clients that train."""
        return max(1, len(self.steps_per_round))

    @property
    def key(self) -> str:
        """One line that identifies the row."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Spec:
        """Read a row's spec; fields that an older row lacks have their defaults."""
        given = dict(row["spec"])
        return cls(**{**given, "steps_per_round": tuple(given["steps_per_round"])})


def equal(clients: int, every: int, coding: str, seed: int) -> Spec:
    """`clients` of equal speed, with the outer optimizer's defaults."""
    return Spec(seed, (every,) * clients, coding)


def alone(seed: int, *, times_batch: int = 1, rate: float = LEARNING_RATE) -> Spec:
    """No synchronization; `times_batch` takes that many batches into one step."""
    return Spec(
        seed,
        batch=BATCH * times_batch,
        learning_rate=rate,
        budget_steps=BUDGET_STEPS // times_batch,
    )


FORMATS = ("fp32", "bf16", "e4m3", "uniform")
PERIODS = (20, 50, 100)
COUNTS = (2, 4)
INNER_RATES = (1e-3, 2e-3, 4e-3)
OUTER: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (4, "Nesterov 0.9, rate 0.4", {"outer_learning_rate": 0.4}),
    (4, "Nesterov 0.9, rate 0.7 (default)", {}),
    (4, "Nesterov 0.9, rate 1", {"outer_learning_rate": 1.0}),
    (4, "Nesterov 0.5, rate 0.7", {"outer_momentum": 0.5}),
    (4, "averaging", {"optimizer": "average"}),
    (4, "Nesterov 0.9, rate 0.7, each client all data", {"sharding": "local"}),
    (4, "averaging, each client all data", {"optimizer": "average", "sharding": "local"}),
    (1, "Nesterov 0.9, rate 0.7", {}),
    (1, "averaging", {"optimizer": "average"}),
)
COARSE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("e4m3", {"format": "e4m3"}),
    ("e4m3, feedback up", {"format": "e4m3", "feedback_up": True}),
    ("uniform, step 2^-3.5 rms", {"format": "uniform"}),
    ("uniform, step 2^-3.5 rms, feedback up", {"format": "uniform", "feedback_up": True}),
    ("uniform, step 2^-2 rms", {"format": "uniform", "step_log2": 8}),
    (
        "uniform, step 2^-2 rms, feedback up",
        {"format": "uniform", "step_log2": 8, "feedback_up": True},
    ),
    ("uniform, step 1 rms", {"format": "uniform", "step_log2": 0}),
    (
        "uniform, step 1 rms, feedback up",
        {"format": "uniform", "step_log2": 0, "feedback_up": True},
    ),
)
WEIGHTINGS = ("tokens", "uniform", "fednova")
UNEQUAL = (100, 50, 25, 25)


def outer(clients: int, changed: Mapping[str, Any], seed: int) -> Spec:
    """50 steps, fp32, with one setting changed."""
    return attrs.evolve(equal(clients, 50, "fp32", seed), **changed)


def coarse(changed: Mapping[str, Any], seed: int) -> Spec:
    """Two clients, 20 steps, with another format."""
    return attrs.evolve(equal(2, 20, "e4m3", seed), **changed)


def unequal(weighting: str, seed: int) -> Spec:
    """Four clients, the fastest of which makes four times the steps of the slowest in a round."""
    return Spec(seed, UNEQUAL, "e4m3", weighting=weighting)


def grid(seeds: tuple[int, ...]) -> Iterator[Spec]:
    """Every row that the tables need, each once, in the order in which they are run."""
    seen = set()
    wanted = [alone(0, rate=rate) for rate in INNER_RATES if 0 in seeds]
    for seed in seeds:
        wanted.append(alone(seed))
        wanted += [equal(c, h, f, seed) for f in reversed(FORMATS) for c in COUNTS for h in PERIODS]
    for seed in seeds:
        wanted += [outer(count, changed, seed) for count, _, changed in OUTER]
        wanted += [unequal(name, seed) for name in WEIGHTINGS]
        wanted += [coarse(changed, seed) for _, changed in COARSE]
        wanted += [alone(seed, times_batch=count) for count in COUNTS]
    for spec in wanted:
        if spec.key not in seen:
            seen.add(spec.key)
            yield spec


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by their spec's key."""
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[Spec.of_row(row).key] = row
    return rows

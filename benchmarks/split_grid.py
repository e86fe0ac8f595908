"""The rows of `split_methods.py`: what each of them measures, and which of them there are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from fsl_async.tools.compare.choices import Choices

SEEDS = (0, 1, 2)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
METHODS = ("splitfed-v1", "fsl-sage")
FORMATS: tuple[tuple[str, int], ...] = (("fp32", 14), ("e4m3", 14), ("uniform", 14), ("uniform", 8))
"""And step_log2 of uniform."""
LINK = "200mbit,45ms"
LAB = "transatlantic"
"""A profile of the network laboratory: 200 Mbit/s, 45 ms each way, 0.1 % loss."""

COMMON: dict[str, Any] = {
    "model": "small-cnn",
    "cut": "pool1",
    "clients": 5,
    "batch": 32,
    "auxiliary": "blocks:1",
    "upload_every": 5,
    "align_every": 2,
    "align_passes": 10,
    "align_rate": 3e-3,
    "buffer_samples": 256,
    "stops_at_target": True,
}
IDLE: dict[str, Any] = {
    "model": "small-cnn",
    "sizes": "width=32",
    "cut": "pool2",
    "auxiliary": "linear",
    "clients": 2,
    "batch": 128,
    "align_every": 2,
    "in_flight": 2,
    "evaluates": False,
}


@frozen
class Spec:
    """A row.

    kind: methods | formats | idle. data: the data set's name in the tables. more: choices in which
    it differs from the kind's.
    """

    kind: str
    data: str
    method: str
    seed: int = 0
    more: tuple[tuple[str, Any], ...] = ()
    net: str = ""

    def choices(self, path: str) -> Choices:
        """The choices for `compare`."""
        common = IDLE if self.kind == "idle" else COMMON
        return Choices(
            methods=(self.method,), data=path, seed=self.seed, **{**common, **dict(self.more)}
        )

    @property
    def key(self) -> str:
        """One line that identifies the row, except where the data are."""
        found = attrs.asdict(self.choices("-"))
        found |= {"kind": self.kind, "data": self.data, "net": self.net}
        return json.dumps(found, sort_keys=True)

    def has(self, name: str) -> Any:
        """Whether one of the choices is set."""
        return getattr(self.choices("-"), name)


@frozen
class Task:
    """A task on a data set: its name, the target accuracy, the rounds after which a run is given
    up, and the learning rates that both methods try.
    """

    data: str
    target: float
    rounds: int = 9
    rates: tuple[float, ...] = RATES

    def spec(self, kind: str, method: str, seed: int, **more: Any) -> Spec:
        """A row of this task."""
        given = {"target": self.target, "rounds": self.rounds, **more}
        return Spec(kind, self.data, method, seed, tuple(sorted(given.items())))


def tuning(task: Task) -> list[Spec]:
    """Both methods at every learning rate, seed 0."""
    return [task.spec("methods", m, 0, learning_rate=rate) for rate in task.rates for m in METHODS]


def best_rate(task: Task, method: str, rows: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The rate with the fewest bytes to the target; None until all of them were tried."""
    tried = [spec for spec in tuning(task) if spec.method == method]
    if any(spec.key not in rows for spec in tried):
        return None

    def size(spec: Spec) -> float:
        reached = rows[spec.key]["reached"]
        return float(reached["bytes"]) if reached else float("inf")

    return float(min(tried, key=size).has("learning_rate"))


def methods_grid(task: Task, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Spec]:
    """Tuning, then the other seeds at each method's best rate."""
    yield from tuning(task)
    for seed in SEEDS:
        for method in METHODS:
            rate = best_rate(task, method, rows)
            if rate is not None:
                yield task.spec("methods", method, seed, learning_rate=rate)


def formats_grid(task: Task) -> Iterator[Spec]:
    """SplitFed V1 with each format for activations; gradients as bf16 in all of them."""
    for seed in SEEDS:
        for name, step_log2 in FORMATS:
            yield formats_spec(task, seed, name, step_log2)


def formats_spec(task: Task, seed: int, name: str, step_log2: int) -> Spec:
    """One of them."""
    return task.spec(
        "formats", "splitfed-v1", seed, learning_rate=2e-3, up=name, step_log2=step_log2
    )


def idle_grid(data: str) -> Iterator[Spec]:
    """Rounds of 40 batches and more, behind the proxy and in the network laboratory; longer ones
    are of no use to SplitFed V1.
    """
    for net, method, batches, rounds, formats in (
        (LINK, "fsl-sage", 40, 3, "fp32"),
        (LINK, "fsl-sage", 120, 2, "fp32"),
        (LINK, "splitfed-v1", 40, 3, "fp32"),
        (LAB, "fsl-sage", 40, 2, "fp32"),
        (LAB, "fsl-sage", 40, 2, "e4m3"),
        (LAB, "fsl-sage", 100, 2, "fp32"),
        (f"{LAB}:loss=0%", "fsl-sage", 40, 2, "fp32"),
        (f"{LAB}:loss=0%", "fsl-sage", 100, 2, "e4m3"),
        (f"{LAB}:loss=0%", "splitfed-v1", 40, 2, "fp32"),
        (LAB, "splitfed-v1", 40, 2, "fp32"),
        (LAB, "splitfed-v1", 40, 2, "fp32 e4m3"),
    ):
        more: dict[str, Any] = {"samples": 128 * batches, "rounds": rounds}
        models, _, cut = formats.partition(" ")
        if cut:
            more |= {"up": cut, "down": cut}
        if models != "fp32":
            more["models"] = models
        yield Spec("idle", data, method, 0, tuple(sorted(more.items())), net)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by their spec's key; of those that were measured again, the last."""
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["key"]] = row
    return rows

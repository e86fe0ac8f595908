"""The rows of `split_methods.py`: what each of them measures, and which of them there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from fsl_async.tools.compare.choices import SPLIT_ROWS, SPLIT_SETTINGS
from fsl_async.tools.compare.split import SplitChoices

SEEDS = (0, 1, 2)
RATE = 1e-3
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("splitfed-v1", {}),
    ("fsl-sage", {}),
    ("fsl-sage", {"align_every": 0}),
)
"""True gradients, gradients of an aligned auxiliary model, and of one that is never aligned."""
FORMATS: tuple[tuple[str, int], ...] = (("fp32", 14), ("e4m3", 14), ("uniform", 14), ("uniform", 8))
"""And step_log2 of uniform."""
LINK = "200mbit,45ms"
LAB = "transatlantic"
"""A profile of the network laboratory: 200 Mbit/s, 45 ms each way, 0.1 % loss."""

USUAL: dict[str, Any] = {
    "sets": [],
    "given": [],
    "data": "-",
    "model": "small-cnn",
    "cut": "",
    "sizes": "",
    "auxiliary": "blocks:1",
    "clients": 4,
    "rounds": 10,
    "target": 0.5,
    "batch": 32,
    "samples": 0,
    "learning_rate": 1e-3,
    "weight_decay": 1e-4,
    "optimizer": "adamw",
    "upload_every": 5,
    "align_every": 2,
    "align_passes": 20,
    "align_rate": 3e-3,
    "buffer_samples": 256,
    "alpha": 0.0,
    "up": "bf16",
    "down": "bf16",
    "models": "fp32",
    "step_log2": 14,
    "mode": "free",
    "in_flight": 2,
    "evaluates": True,
    "stops_at_target": False,
}
"""All values of a row; kept rows are found by them."""
SETTINGS = {key.partition(".")[2]: key for key in (*SPLIT_SETTINGS, *SPLIT_ROWS)}
STEPS = ("codec.up_step", "codec.down_step")
COMMON: dict[str, Any] = {
    "model": "small-cnn",
    "clients": 5,
    "batch": 32,
    "auxiliary": "blocks:1",
    "upload_every": 5,
    "align_every": 2,
    "align_passes": 10,
    "align_rate": 3e-3,
    "buffer_samples": 256,
}
OWN: dict[str, dict[str, Any]] = {
    "methods": {"cut": "pool2"},
    "formats": {"cut": "pool1", "stops_at_target": True},
}
"""Choices of each kind. Behind pool1 a client trains as well without alignment."""
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

    @property
    def values(self) -> dict[str, Any]:
        """All values by name."""
        common = IDLE if self.kind == "idle" else COMMON | OWN[self.kind]
        own = {"methods": [self.method], "seed": self.seed}
        return {**USUAL, **own, **common, **dict(self.more)}

    def choices(self, path: str) -> SplitChoices:
        """The choices for `compare`."""
        values = self.values
        names = ("model", "clients", "rounds", "stops_at_target", "seed")
        return SplitChoices(
            methods=(self.method,),
            data=(path,),
            target_accuracy=values["target"],
            score_every=int(values["evaluates"]),
            settings={key: values[name] for name, key in SETTINGS.items()},
            sets=(
                f"split.models={values['models']}",
                *(f"{key}={2 ** (-values['step_log2'] / 4):.4g}" for key in STEPS),
            ),
            **{name: values[name] for name in names},
        )

    @property
    def key(self) -> str:
        """One line that identifies the row, except where the data are."""
        found = self.values | {"kind": self.kind, "data": self.data, "net": self.net}
        return json.dumps(found, sort_keys=True)


@frozen
class Task:
    """A task on a data set: its name, the target accuracy, and the rounds of a run."""

    data: str
    target: float
    rounds: int = 12

    def spec(self, kind: str, method: str, seed: int, **more: Any) -> Spec:
        """A row of this task."""
        given = {"target": self.target, "rounds": self.rounds, **more}
        return Spec(kind, self.data, method, seed, tuple(sorted(given.items())))


def methods_grid(task: Task) -> Iterator[Spec]:
    """All variants with each seed, at the published learning rate."""
    for seed in SEEDS:
        for method, more in VARIANTS:
            yield task.spec("methods", method, seed, learning_rate=RATE, **more)


def formats_grid(task: Task) -> Iterator[Spec]:
    """SplitFed V1 with each format for activations; gradients as bf16 in all of them."""
    for seed in SEEDS:
        for name, step_log2 in FORMATS:
            more = {"learning_rate": 2e-3, "up": name, "step_log2": step_log2}
            yield task.spec("formats", "splitfed-v1", seed, **more)


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

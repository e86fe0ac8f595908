"""What a row of `quality.py` measures. Values that a spec leaves out are the product's defaults."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen
from quality_text import HELD_OUT_BYTES, mixed

from fsl_async.config.rules import Format
from fsl_async.config.settings import FINE_STEP, CodecConfig, OuterConfig
from fsl_async.config.settings_training import TrainConfig

PROTOCOL = 2
"""Rows of another protocol are not comparable, and are ignored."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {"layers": 2, "width": 64, "heads": 4, "context": 64},
    "0.5m": {"layers": 4, "width": 96, "heads": 4, "context": 128},
    "10m": {"layers": 6, "width": 384, "heads": 6, "context": 256},
}
"""0.115 M, 0.47 M and 10.7 M parameters."""

BATCH = 4
TOTAL_STEPS = 9600
"""Steps of BATCH windows in all: 21 bytes a parameter for "small", as Chinchilla's optimum."""

_TRAIN, _OUTER = TrainConfig(), OuterConfig()


@frozen(kw_only=True)
class Spec:
    """What a row measures.

    mode: "clients" synchronize; "parallel" is synchronous data parallel, the gradients of all
    clients' batches averaged at each step; "alone" is one process with all the steps.
    steps: of each client in a round. total_steps: batches in all, over the clients.
    """

    seed: int
    mode: str = "clients"
    steps: tuple[int, ...] = ()
    total_steps: int = TOTAL_STEPS
    size: str = "small"
    batch: int = BATCH
    batches: tuple[int, ...] = ()
    """Of each client, where they differ; as many windows in all as `batch` would give."""
    text: str = "code"
    """See `quality_text`."""
    sharding: str = "disjoint"
    inner: str = _TRAIN.optimizer
    learning_rate: float = _TRAIN.learning_rate
    muon_rate: float = _TRAIN.muon_rate
    schedule: str = _TRAIN.schedule
    decay_share: float = _TRAIN.decay_share
    planned: bool = True
    outer: str = _OUTER.optimizer
    outer_learning_rate: float = _OUTER.learning_rate
    momentum: float = _OUTER.momentum
    weighting: str = "batch"
    """Clients of equal steps and batches weigh the same by every rule: `key` leaves it out."""
    aggregation: str = "mean"
    format: Format = "uniform"
    up_step: float = FINE_STEP
    down_step: float = FINE_STEP
    """The steps of uniform, in root mean squares of a block. Most tables compare other things, and
    their rows have steps too fine to matter."""
    stale: int = 0
    """Rounds that the deltas of the last client are late."""
    late_joiner: bool = False
    """The last client joins at half time."""
    dies: bool = False
    """The first client is gone from three quarters on."""
    groups: int = 1
    """Parameter servers, each with an equal part of the clients."""
    global_every: int = 6
    """Rounds from one global round of the groups to the next."""
    group_momentum: str = "keep"
    """Or "reset": a group's outer momentum after a global round."""
    device: str = "cpu"

    @property
    def codec(self) -> CodecConfig:
        """How weights travel."""
        return CodecConfig(
            up=self.format, down=self.format, up_step=self.up_step, down_step=self.down_step
        )

    @property
    def clients(self) -> int:
        """The number of clients that train."""
        return max(1, len(self.steps))

    @property
    def rounds(self) -> int:
        """Rounds in which the clients together make `total_steps`."""
        return round(self.total_steps / sum(self.steps))

    @property
    def key(self) -> str:
        """One line that identifies the row."""
        alike = len(set(self.steps)) < 2 and len(set(self.batches)) < 2
        spec = attrs.evolve(self, weighting="") if alike else self
        return json.dumps(attrs.asdict(spec), sort_keys=True)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Spec:
        """Read a row's spec."""
        given = dict(row["spec"])
        for name in ("steps", "batches"):
            given[name] = tuple(given.get(name, ()))
        return cls(**given)

    def tables(self, client: int = 0) -> dict[str, dict[str, Any]]:
        """The run's configuration at a client, as far as the built-in task reads it."""
        data: dict[str, Any] = {"sharding": self.sharding}
        if self.text == "mixed":
            path = Path(mixed(self.seed, self.clients)[client])
            data = {"sharding": "local", "path": str(path)}
            data["holdout"] = HELD_OUT_BYTES / path.stat().st_size
        train = {
            "batch": self.batches[client] if self.batches else self.batch,
            "optimizer": self.inner,
            "learning_rate": self.learning_rate,
            "muon_rate": self.muon_rate,
            "schedule": self.schedule,
            "decay_share": self.decay_share,
            "threads": 1,
        }
        return {"train": train, "model": dict(SIZES[self.size]), "data": data}


TRAINING = (
    "learn/client/optimizers.py",
    "learn/client/pretrain.py",
    "learn/client/schedule.py",
    "learn/data/corpus.py",
    "learn/models/gpt.py",
)
SYNC = (
    "learn/client/delta_coder.py",
    "learn/client/exchange.py",
    "roles/sync/progress.py",
    "store/merge/merge.py",
    "store/rules/outer.py",
    "store/vectors/vectors.py",
)
"""Modules that decide a row's loss, of clients besides TRAINING; a row carries a digest of their
code.

Weights of clients are not among them: tests hold these to their definitions, and a row names its
own.
"""


def code_digest(mode: str) -> str:
    """12 hex characters over the code that rows of `mode` run, without comments and docstrings."""
    folder = Path(__file__).parents[1] / "fsl_async"
    digest = hashlib.sha256()
    for name in (*TRAINING, *(SYNC if mode == "clients" else ())):
        tree = ast.parse((folder / name).read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
        digest.update(_dump(tree).encode())
    return digest.hexdigest()[:12]


def _dump(tree: ast.AST) -> str:
    """The same text for the same code with each Python: that of Python 3.11.

    Python 3.12 has a field more, which is empty here; 3.13 leaves empty lists out unless asked.
    """
    everything: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(tree, **everything).replace(", type_params=[]", "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of this protocol by their spec's key."""
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row.get("protocol") == PROTOCOL:
                rows[Spec.of_row(row).key] = row
    return rows

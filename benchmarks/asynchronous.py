"""Loss of the built-in GPT with rounds and without, on clients of unequal speed, with churn.

    python benchmarks/asynchronous.py            every row, three seeds, but rows of this code
    python benchmarks/asynchronous.py --quick    one short row of each kind, to standard output
    python benchmarks/asynchronous.py --table    the rows so far

Each row is a run of `fsl_async.simulate`: production code and real training in virtual time, on a
network without limits, so that a row is the same for the same seed. The fastest clients make a step
in one virtual second. A run that ends by tokens merges in its last round what was trained besides:
see "tokens" of a row. Its versions are evaluated afterwards, from its run directory.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from quality_spec import code_digest

from fsl_async.config.load import load
from fsl_async.config.settings import Config
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.models.gpt import GPT, gpt_config
from fsl_async.tools.sim.result import Result
from fsl_async.tools.sim.settings import PROFILES, FaultProfile, TaskSettings
from fsl_async.tools.sim.simulate import simulate
from fsl_async.tools.versions import VersionEvaluator

RESULTS = Path(__file__).parent / "results" / "asynchronous.jsonl"
STEP_S = (1.0, 1.0, 2.0, 4.0)
"""Virtual seconds of a step, of each client."""
LOCAL_STEPS = 20
"""Of the fastest client in a round, or between two deltas."""
BATCH, CONTEXT = 4, 64
STEPS = 4800
"""Of all clients together."""
CURVE_POINTS = 24
SEEDS = (0, 1, 2)
PROFILES["churn"] = FaultProfile(client_kill_every_s=400.0, client_return_s=(5.0, 40.0))

COMMON: dict[str, Any] = {
    "sync.clients": len(STEP_S),
    "sync.min_clients": len(STEP_S),
    "sync.every_s": LOCAL_STEPS * STEP_S[0],
    "sync.round_cap_s": 10 * LOCAL_STEPS * STEP_S[0],
    "session.heartbeat_every_s": 2.0,
    "session.expire_after_s": 6.0,
    # Limits for single deltas would hide how the ways differ.
    "guard.clip_median": 0,
    "guard.max_tokens_median": 0,
    "guard.max_share": 0,
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 4,
    "model.context": CONTEXT,
    "train.batch": BATCH,
    "train.decay_share": 0.5,
    "store.keep_versions": 100_000,
}
BUFFER: dict[str, Any] = {"sync.trigger": "buffer", "sync.buffer": 2, "outer.optimizer": "average"}
STEPPED: dict[str, Any] = BUFFER | {"sync.local_steps": LOCAL_STEPS}
OWN: dict[str, Any] = BUFFER | {"sync.pace": "own", "train.task": "own"}
WAYS: dict[str, dict[str, Any]] = {
    "timer": {"sync.trigger": "clock"},
    "waits": {"sync.trigger": "rounds"},
    "buffer": STEPPED,
    "buffer, all": STEPPED | {"sync.buffer": len(STEP_S)},
    "buffer, DyLU": STEPPED | {"sync.pace": "speed"},
    "anarchic": OWN | {"sync.weighting": "anarchic"},
    "latest": OWN | {"outer.aggregation": "latest"},
    "Nesterov per arrival": STEPPED
    # The product refuses it for more than one planned client.
    | {"sync.buffer": 1, "sync.clients": 1, "sync.min_clients": 1, "data.shards": len(STEP_S)}
    | {"outer.optimizer": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.9},
}
"""The settings of each way to merge."""


@frozen(kw_only=True)
class Row:
    """What is measured. end: what ends the run, "tokens" or "time"."""

    way: str
    seed: int = 0
    end: str = "tokens"
    churn: bool = False
    steps: int = STEPS

    @property
    def key(self) -> str:
        """One line that identifies it."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    @property
    def config(self) -> Config:
        """The run's configuration.

        It ends after the tokens of all steps, or the time in which no client idles for them.
        """
        end: dict[str, Any] = {"run.tokens": self.steps * BATCH * CONTEXT}
        if self.end == "time":
            end = {"run.seconds": round(self.steps / sum(1 / each for each in STEP_S), 1)}
        settings = COMMON | WAYS[self.way] | end | {"run.seed": self.seed}
        return load(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def train(fed: Fed) -> None:
    """Train the GPT: by rounds where the run has them, and else until it ends."""
    model = GPT(gpt_config(fed.config), seed=fed.seed)
    batches = fed.shard(pretrain.open_corpus(fed.config, CONTEXT), batch=BATCH)
    fed.attach(model)
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)

    def step() -> dict[str, float]:
        loss = model.loss(next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return {"loss": loss.item()}

    tokens = BATCH * CONTEXT
    if fed.config["sync"]["trigger"] == "rounds":
        for _ in fed.rounds():
            for _ in range(LOCAL_STEPS - 1):
                fed.step(tokens=tokens, metrics=step())
            fed.end_round(samples=tokens, metrics=step())
        return
    sends = fed.config["sync"]["pace"] == "own"
    left = random.randint(1, 2 * LOCAL_STEPS)
    while fed.step(tokens=tokens, metrics=step()):
        left -= 1
        if sends and left <= 0:
            fed.send()
            left = random.randint(1, 2 * LOCAL_STEPS)


def measure(row: Row) -> dict[str, Any]:
    """Run one row."""
    begun = time.perf_counter()
    settings = TaskSettings(
        clients=len(STEP_S),
        faults="churn" if row.churn else "none",
        step_seconds=STEP_S[0],
        rates=tuple(STEP_S[0] / each for each in STEP_S),
    )
    with tempfile.TemporaryDirectory(prefix="asynchronous-") as folder:
        result = simulate(train, row.config, settings, Path(folder) / "run")
        curve = list(curve_of(row, result))
    return {
        "bench": "asynchronous",
        "code": code_digest("clients"),
        "spec": attrs.asdict(row),
        "eval_loss": curve[-1][2],
        "emulated_s": curve[-1][0],
        "tokens": result.points[-1].tokens,
        "versions": result.points[-1].version,
        "killed": result.faults.get("client killed", 0),
        "curve": curve,
        "seconds": round(time.perf_counter() - begun, 1),
        "torch": torch.__version__,
    }


def curve_of(row: Row, result: Result) -> Iterator[tuple[float, int, float]]:
    """Give seconds since version 0, tokens and held-out loss of versions, those of the last one on
    more bytes.
    """
    short, full = (
        VersionEvaluator(
            result.run_dir, data=None, limit_bytes=min(limit_bytes, 8 * row.steps), own=None
        )
        for limit_bytes in (1 << 15, 1 << 17)
    )
    done, last = 0, result.points[-1]
    for point in result.points:
        part = CURVE_POINTS * point.tokens // (row.steps * BATCH * CONTEXT)
        if part > done or point is last:
            done, versions = part, full if point is last else short
            loaded = versions.load(point.version)
            assert loaded is not None, "all versions are kept"
            loss = versions.evaluate(loaded)["loss"]
            seconds = 3600 * (point.hours - result.points[0].hours)
            yield round(seconds, 1), point.tokens, math.inf if loss is None else round(loss, 5)


def rows() -> Iterator[Row]:
    """Every row, those that rank the ways first."""
    for churn in (False, True):
        for end in ("tokens", "time"):
            for seed in SEEDS:
                for way in WAYS:
                    yield Row(way=way, seed=seed, end=end, churn=churn)


def stored() -> dict[str, dict[str, Any]]:
    """The rows on disk by key, the newest of each."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return {Row(**one["spec"]).key: one for one in found}


def table() -> Iterator[dict[str, Any]]:
    """Means over seeds, and the time to the loss of rounds that wait, over theirs.

    rows_of_other_code: how many of the rows were made by another version of the code.
    """
    found = list(stored().values())
    for end in ("tokens", "time"):
        for churn in (False, True):
            mine = [
                one for one in found if (one["spec"]["end"], one["spec"]["churn"]) == (end, churn)
            ]
            waits = {one["spec"]["seed"]: one for one in mine if one["spec"]["way"] == "waits"}
            for way in WAYS:
                some = [one for one in mine if one["spec"]["way"] == way]
                if not some:
                    continue
                shares = [_share(one, waits[one["spec"]["seed"]]) for one in some
                          if one["spec"]["seed"] in waits]  # fmt: skip
                yield {
                    "way": way,
                    "end": end,
                    "churn": churn,
                    "seeds": len(some),
                    "rows_of_other_code": sum(
                        one["code"] != code_digest("clients") for one in some
                    ),
                    "eval_loss": round(statistics.mean(one["eval_loss"] for one in some), 4),
                    "emulated_s": round(statistics.mean(one["emulated_s"] for one in some)),
                    "time_to_loss_of_waits": round(statistics.mean(shares), 3) if shares else None,
                }


def _share(row: dict[str, Any], waits: dict[str, Any]) -> float:
    """Time to the last loss of `waits`, over its time; infinite where it is never reached."""
    target, at = waits["curve"][-1][2], waits["curve"][-1][0]
    return next((time_s / at for time_s, _, loss in row["curve"] if loss <= target), math.inf)


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--way", default="", help="only this one")
    parser.add_argument("--steps", type=int, default=0)
    given = parser.parse_args()
    if given.table:
        for line in table():
            print(json.dumps(line))
        return 0
    if given.quick:
        for name, way in WAYS.items():
            if given.way in ("", name):
                row = Row(way=name, churn=way.get("sync.pace") == "own", steps=given.steps or 240)
                print(json.dumps(measure(row)), flush=True)
        return 0
    done = {key for key, one in stored().items() if one["code"] == code_digest("clients")}
    for row in rows():
        if row.key in done or given.way not in ("", row.way):
            continue
        found = measure(row)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps({name: found[name] for name in ("spec", "eval_loss", "seconds")}))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

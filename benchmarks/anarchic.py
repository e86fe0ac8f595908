"""Measures what sites that send more often than others do to a model, by weighting.

    python benchmarks/anarchic.py CACHE                       all rows
    python benchmarks/anarchic.py CACHE --only "latest/8*"    rule/arrivals
    python benchmarks/anarchic.py CACHE --seed 1              with other batches and another model
    python benchmarks/anarchic.py CACHE --table ROWS.jsonl    print the table of means over seeds

Real: `fsl-node --role ps` in its own process; six clients in this one, each with its thread,
session, streams, codec and decisions (`ClientRuntime`). The model and its vectors are those of
`poison`: LoRA factors of rank 8 of a random frozen tanh layer, and a head, on mean-pooled
all-MiniLM-L6-v2 vectors of movie reviews. Sites 0 and 1 have 95 % positive reviews, 2 and 3 half, 4
and 5 have 5 %: together half. Their speeds are 8 : 8 : 2 : 2 : 1 : 1, or equal. Each calls
`fed.send` after 1 to 20 steps of AdamW by chance (`sync.pace = own`); two deltas make a version,
and VERSIONS end a run. So positive sites send most of the deltas, and the model sees the mix of
those who send.

`positive`: share of 400 positive and 400 negative other reviews that the last version calls
positive; the standard error of an accuracy on them is 1.6 points. `positive_mean`, `swing`: mean
and standard deviation of that share over the last LAST versions. `loss`: the cross-entropy on
reviews of the shares of sites 0 and 1, 2 and 3, 4 and 5. `arrivals`, `weight`: the shares of each
site by `fsl-node status`, over the last 64 versions. `bytes`: of the deltas that are kept.
Optimizer and schedule are those of the built-in fine-tuning: AdamW is kept, and its rates fall at
the end of the run.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from node_process import serving
from numpy.typing import NDArray
from poison import BATCH, RATE, Model, vectors, write
from torch import Tensor, nn
from under_attack import drain

from fsl_async.commands.status_report import NodeStatus
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.files.files import Files
from fsl_async.learn.client.fed import Fed
from fsl_async.nodes.client.joining import context_of
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger
from fsl_async.process.stopper import Stopper
from fsl_async.store.recovery.run_directory import read_manifest
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import Checkpoints

POSITIVES = (0.95, 0.95, 0.5, 0.5, 0.05, 0.05)
SITES, ROWS, TEST = len(POSITIVES), 500, 400
VERSIONS, LAST, MOST_STEPS, STEP_S = 120, 30, 20, 0.2
"""STEP_S: seconds of a step at a speed of 1."""
SPEEDS = {"8:2:1": (8.0, 8.0, 2.0, 2.0, 1.0, 1.0), "equal": (22 / 6,) * SITES}
RULES: dict[str, dict[str, Any]] = {
    "uniform": {"sync.weighting": "uniform"},
    "tokens": {"sync.weighting": "tokens"},
    "anarchic": {"sync.weighting": "anarchic"},
    "latest": {"outer.aggregation": "latest"},
    "arrivals": {"sync.weighting": "arrivals"},
}


class Problem:
    """The reviews of each site, and 400 of each label for the test."""

    def __init__(self, folder: Path) -> None:
        found = vectors(folder)
        self.inputs = torch.from_numpy(found["plain"] / np.sqrt((found["plain"] ** 2).mean()))
        self.labels = torch.from_numpy(found["labels"]).long()
        pools = [list(np.flatnonzero(found["labels"] == label)) for label in (0, 1)]
        self.test = [np.array([pool.pop() for _ in range(TEST)]) for pool in pools]
        self.mine: list[NDArray[np.int64]] = []
        for share in POSITIVES:
            counts = ROWS - round(share * ROWS), round(share * ROWS)
            drawn = zip(pools, counts, strict=True)
            self.mine.append(np.array([pool.pop() for pool, many in drawn for _ in range(many)]))

    def loss(self, model: nn.Module, rows: NDArray[np.int64]) -> Tensor:
        """The cross-entropy on reviews of these numbers."""
        return nn.functional.cross_entropy(model(self.inputs[rows]), self.labels[rows])

    def scores(self, model: nn.Module) -> dict[str, Any]:
        """Figures of a model on the test."""
        with torch.inference_mode():
            logits = [model(self.inputs[rows]) for rows in self.test]
            called = [one.argmax(1).double().mean().item() for one in logits]
            losses = [self.loss(model, rows).item() for rows in self.test]
        return {
            "accuracy": round((1 - called[0] + called[1]) / 2, 4),
            "positive": round(sum(called) / 2, 4),
            "loss": [
                round(share * losses[1] + (1 - share) * losses[0], 3) for share in POSITIVES[::2]
            ],
        }


def play(problem: Problem, seed: int, address: str, site: int, rates: str) -> None:
    """Be a client of the run to its end."""
    options = ClientOptions(address, f"site-{site}", policy=SitePolicy(frozenset(KINDS)))
    runtime = ClientRuntime(options, stop=Stopper(), log=lambda _: None)
    try:
        member = runtime.wait_welcome()
        fed = Fed(runtime.training, context_of(options, member, lambda _: None), runtime)
        model, rng = Model(problem.inputs.shape[1], seed), np.random.default_rng((seed, site))
        fed.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        scheduler = fed.scheduler(optimizer)
        until_sent, due = 0, time.monotonic()
        while True:
            until_sent = until_sent or int(rng.integers(1, MOST_STEPS + 1))
            due = max(due + STEP_S / SPEEDS[rates][site], time.monotonic() - STEP_S)
            time.sleep(max(0.0, due - time.monotonic()))
            optimizer.zero_grad()
            problem.loss(model, rng.choice(problem.mine[site], BATCH)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            if not fed.step(tokens=BATCH):
                break
            until_sent -= 1
            if not until_sent:
                fed.send()
    finally:
        runtime.training_ended(None)


def scores_of(run_dir: Path, problem: Problem, seed: int) -> list[dict[str, Any]]:
    """Figures of the last versions, oldest first."""
    checkpoints, manifest = Checkpoints(Files(), run_dir), read_manifest(Files(), run_dir)
    model, found = Model(problem.inputs.shape[1], seed), []
    for version in sorted(checkpoints.versions())[-LAST:]:
        weights = read_version(Files(), checkpoints, version, manifest).weights
        write(model, torch.from_numpy(weights))
        found.append(problem.scores(model))
    return found


def measure(rule: str, arrivals: str, seed: int, problem: Problem) -> dict[str, Any]:
    """Play a run."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    settings = {
        "run.rounds": VERSIONS,
        "sync.trigger": "buffer",
        "sync.pace": "own",
        "sync.buffer": 2,
        "sync.every_s": 4.0,
        "sync.clients": SITES,
        "sync.min_clients": SITES,
        "outer.optimizer": "average",
        "train.task": "own",
        "tune.method": "lora",
        "store.keep_versions": LAST,
        **RULES[rule],
    }
    with tempfile.TemporaryDirectory(prefix="anarchic-") as place:
        run_dir = Path(place, "run")
        with serving(run_dir, settings) as server:
            threading.Thread(target=drain, args=(server,), daemon=True).start()
            threads = [
                threading.Thread(target=play, args=(problem, seed, server.address, site, arrivals))
                for site in range(SITES)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        scores = scores_of(run_dir, problem, seed)
        audit, state = audit_run(run_dir), NodeStatus(run_dir).state
        versions = [one for one in read_ledger(run_dir / LEDGER)[0] if one["fact"] == "version"]
    shares = state.ps.shares.of_clients()
    stale = [entry["staleness"] for one in versions for entry in one["merged"]]
    return {
        "bench": "anarchic",
        "rule": rule,
        "rates": arrivals,
        "seed": seed,
        **scores[-1],
        "positive_mean": round(float(np.mean([one["positive"] for one in scores])), 4),
        "swing": round(float(np.std([one["positive"] for one in scores])), 4),
        "arrivals": [shares[f"site-{site}"]["arrivals"] for site in range(SITES)],
        "weight": [shares[f"site-{site}"]["weight"] for site in range(SITES)],
        "deltas": len(stale),
        "versions": len(versions) - 1,
        "staleness": round(float(np.mean(stale)), 2),
        "bytes": sum(one.delta_bytes for one in state.clients.values()) if rule == "latest" else 0,
        "lost": len(audit.lost),
        "doubled": len(audit.doubled),
        "seconds": round(time.monotonic() - begun, 1),
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table of means, and of the largest distance from them."""
    yield (
        "| weighting | sites send | called positive | mean of the last versions, swing | accuracy"
        " | loss at frequent, middle, rare sites | their weight |"
    )
    yield "|---|---|---:|---:|---:|---|---|"
    for arrivals, rule in product(SPEEDS, RULES):
        cell = [one for one in rows if (one["rule"], one["rates"]) == (rule, arrivals)]
        if cell:
            losses = np.mean([one["loss"] for one in cell], axis=0)
            positive, late, swing = (
                100 * np.array([one[name] for one in cell])
                for name in ("positive", "positive_mean", "swing")
            )
            accuracy = np.array([one["accuracy"] for one in cell])
            weight = np.mean([one["weight"] for one in cell], axis=0).reshape(-1, 2).sum(1)
            yield (
                f"| `{rule}` | {arrivals} | {_spread(positive, 0)} % | {late.mean():.0f} %,"
                f" {swing.mean():.0f} | {_spread(accuracy, 3)} |"
                f" {', '.join(f'{one:.2f}' for one in losses)} |"
                f" {', '.join(f'{one:.0%}' for one in weight)} |"
            )


def _spread(values: NDArray[np.float64], decimals: int) -> str:
    mean = values.mean()
    return f"{mean:.{decimals}f} +- {np.abs(values - mean).max():.{decimals}f}"


@click.command()
@click.argument("folder", metavar="CACHE", type=click.Path(path_type=Path))
@click.option("--only", default="*", help="Rows whose rule/arrivals is like this.")
@click.option("--seed", default=0, help="Of the model and the batches.")
@click.option("--table", "path", type=click.Path(path_type=Path), help="Print the table of rows.")
def main(folder: Path, only: str, seed: int, path: Path | None) -> None:
    """Print a JSON line for each row."""
    if path is not None:
        print("\n".join(table([json.loads(line) for line in path.read_text().splitlines()])))
        return
    problem = Problem(folder)
    for arrivals, rule in product(SPEEDS, RULES):
        if fnmatch(f"{rule}/{arrivals}", only):
            print(json.dumps(measure(rule, arrivals, seed, problem)), flush=True)


if __name__ == "__main__":
    main()

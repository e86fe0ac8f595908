"""Held-out loss by aggregation rule when one of five clients attacks, and the cost of each rule.

    python benchmarks/robust.py
        the losses: runs what is missing in benchmarks/results/robust.jsonl (ten minutes, one core)
    python benchmarks/robust.py --cost
        GB of deltas (as fp32) that each rule aggregates a second, spool and outer step included
    python benchmarks/robust.py --table
        print the tables of docs/BENCHMARKS.md from the rows

Real: a small GPT on the source of Python's standard library, AdamW at the clients, the codec, the
Store with its spool, rules and outer step, and the decisions of `guard`
(`fsl_async.roles.sync.norm_guard`) with its records of deltas. Not real: there is no network and
there are no processes; the clients train one after another, each from the newest version on its own
part of the text, and hand in a delta after STEPS steps.

Attacks, by client 0 in every round: "none"; "x -10": its own delta times -10; "noise": normal
values of 10 times its delta's norm; "lie": its delta negated, with a claim of 1,000 times the
tokens. Rules: the mean without limits; with those that are on by default (clipping at 1.5 x the
median of the version, tokens at 10 x it, a third of the weights); with quarantine at 3 x the median
norm; with tokens capped at 3 x the median; and the robust rules against one such client (f = 1).

"diverged" is a loss that is not finite, or above that of guessing bytes at random (5.55 nats).
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from attrs import asdict, evolve, frozen
from sync import manifest_of

from fsl_async.config.settings import GuardConfig
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.delta_admission import DeltaAdmission
from fsl_async.roles.sync.deltas import Counting, DeltaBook
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import RULES, rule_named
from fsl_async.store.rules.outer import Average
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, decode, encode

RESULTS = Path(__file__).parent / "results" / "robust.jsonl"
CLIENTS, ROUNDS, STEPS, BATCH, CONTEXT = 5, 10, 8, 4, 32
SIZES = GPTConfig(1, 32, 2, CONTEXT)
GUESSING = math.log(256)
ATTACKS = ("none", "x -10", "noise", "lie")
OFF = {"clip_median": 0.0, "max_tokens_median": 0.0, "max_share": 0.0}
GUARDS: dict[str, dict[str, float]] = {
    "mean": {},
    "mean, by default": {"clip_median": 1.5, "max_tokens_median": 10.0, "max_share": 0.33},
    "mean, outlier 3 x median": {"outlier_median": 3.0},
    "mean, tokens 3 x median": {"max_tokens_median": 3.0},
    "trimmed": {},
    "median": {},
    "multi-krum": {},
}
SEEDS = (0, 1, 2)


@frozen
class Spec:
    """One run."""

    rule: str
    attack: str
    seed: int


def text() -> torch.Tensor:
    """Bytes of a few modules of the standard library, int64."""
    import argparse
    import decimal
    import inspect
    import subprocess

    modules = (argparse, subprocess, inspect, tempfile, json, statistics, decimal)
    data = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Site:
    """One client: a model, its optimizer, its part of the text."""

    def __init__(self, data: torch.Tensor, seed: int) -> None:
        self.data = data
        self.rng = torch.Generator().manual_seed(seed)
        self.model = GPT(SIZES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)

    def train(self, weights: torch.Tensor) -> np.ndarray[Any, Any]:
        """The delta after STEPS steps from `weights`."""
        torch.nn.utils.vector_to_parameters(weights.clone(), self.model.parameters())
        for _ in range(STEPS):
            at = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=self.rng)
            windows = torch.stack([self.data[i : i + CONTEXT + 1] for i in at.tolist()])
            loss = loss_of(self.model, windows)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        own = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        return np.asarray((weights - own).numpy(), np.float32)


def loss_of(model: GPT, windows: torch.Tensor) -> torch.Tensor:
    """Nats per byte over (B, context + 1) bytes."""
    logits = model(windows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def attacked(delta: np.ndarray[Any, Any], attack: str, rng: np.random.Generator) -> tuple[Any, int]:
    """What client 0 sends, and the factor by which it exaggerates its tokens."""
    if attack == "x -10":
        return -10.0 * delta, 1
    if attack == "noise":
        noise = rng.standard_normal(len(delta)).astype(np.float32)
        return noise * np.float32(10 * np.linalg.norm(delta) / np.linalg.norm(noise)), 1
    return (-delta, 1000) if attack == "lie" else (delta, 1)


class Server:
    """The store, and the parameter server's decision about each delta."""

    def __init__(self, folder: Path, spec: Spec, initial: np.ndarray[Any, Any]) -> None:
        robust = rule_named(spec.rule if spec.rule in RULES else "mean", 1)
        weighting = weighting_named("uniform" if robust.by_rows else "batch")
        self.manifest = Manifest.from_shapes([("all", (len(initial),))])
        outer = Average()
        self.store = Store(
            folder / "run", StoreSettings(2, CodecSpec("uniform"), outer, rule=robust)
        )
        self.store.recover()
        self.store.begin_initial(self.manifest)
        for index, part in enumerate(self._parts(initial)):
            self.store.write_initial(index, encode(part, CodecSpec("fp32")))
        self.store.finish_initial()
        self.screen = NormGuard(GuardConfig(**{**OFF, **GUARDS[spec.rule]}))  # type: ignore[arg-type]
        self.book = DeltaBook(
            weighting,
            max_staleness=4,
            keep_versions=2,
            counting=Counting(weighting, self.screen),
        )
        self.book.advance(0, self.store.digest)
        self.answers = DeltaAdmission({}, self.book, lambda _: None, self.screen)
        self.quarantined = 0

    def _parts(self, vector: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        for index in range(self.manifest.chunks):
            start, stop = self.manifest.chunk_range(index)
            yield np.ascontiguousarray(vector[start:stop], np.float32)

    def take(self, key: DeltaKey, vector: np.ndarray[Any, Any], claimed: int) -> None:
        """Spool a delta and carry out the decision about it."""
        delta = Delta(key, self.store.digest, claimed, STEPS)
        tokens, _ = self.screen.tokens(delta, 0.0)
        self.store.spool_begin(evolve(delta, tokens=tokens))
        for index, part in enumerate(self._parts(vector)):
            self.store.spool_write(key, index, encode(part, CodecSpec("uniform")))
        result = self.store.spool_finish(key)
        if result.problem is not None:
            self.quarantined += 1
            return
        for effect in self.answers.book(result.stored, 0.0):
            if isinstance(effect, do.Quarantine):
                self.quarantined += 1
                self.store.quarantine(effect.key, effect.reason)

    def merge(self) -> None:
        """Make the next version."""
        merged, scale = self.book.begin_merge()
        made = self.store.commit(self.store.version + 1, merged, scale)
        self.book.advance(made.version, made.digest)

    def weights(self) -> torch.Tensor:
        """Weights of the newest version."""
        chunks = (self.store.read_full(self.store.version, n) for n in range(self.manifest.chunks))
        return torch.from_numpy(np.concatenate([decode(chunk or b"") for chunk in chunks]))


def measure(spec: Spec, rounds: int = ROUNDS) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(spec.seed)
    data = text()
    held_out, data = data[-20_000:], data[:-20_000]
    part = len(data) // CLIENTS
    sites = [Site(data[n * part : (n + 1) * part], 100 * spec.seed + n) for n in range(CLIENTS)]
    judge = GPT(SIZES)
    initial = torch.nn.utils.parameters_to_vector(judge.parameters()).detach().numpy().copy()
    rng = np.random.default_rng(spec.seed)
    problem = ""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), spec, initial)
        try:
            for number in range(rounds):
                weights = server.weights()
                for index, site in enumerate(sites):
                    delta, factor = site.train(weights), 1
                    if index == 0:
                        delta, factor = attacked(delta, spec.attack, rng)
                    key = DeltaKey(f"client-{index}", 1, number, number)
                    server.take(key, delta, STEPS * BATCH * CONTEXT * factor)
                server.merge()
        except Exception as error:  # noqa: BLE001 - a run that broke is a result
            problem = f"{type(error).__name__}: {error}"[:200]
        torch.nn.utils.vector_to_parameters(server.weights(), judge.parameters())
        windows = held_out[: 400 * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        with torch.no_grad():
            loss = float(loss_of(judge, windows))
        quarantined = server.quarantined
        server.store.close()
    loss = loss if math.isfinite(loss) else 1e9
    return {
        "spec": asdict(spec),
        "loss": round(loss, 4),
        "quarantined": quarantined,
        "problem": problem,
    }


def cost(clients: int, parameters: int) -> Iterator[dict[str, Any]]:
    """GB/s of each rule: committing deltas that are already in the spool."""
    manifest = manifest_of(parameters)
    values = np.random.default_rng(0).standard_normal(manifest.longest_chunk, np.float32)
    frame = encode(values, CodecSpec("uniform"))
    last = encode(values[: manifest.chunk_values(manifest.chunks - 1)], CodecSpec("uniform"))
    plain = encode(values * np.float32(0.02), CodecSpec("fp32"))
    plain_last = encode(values[: manifest.chunk_values(manifest.chunks - 1)], CodecSpec("fp32"))
    for name in RULES:
        with tempfile.TemporaryDirectory() as folder:
            settings = StoreSettings(2, CodecSpec("uniform"), Average(), rule=rule_named(name, 1))
            store = Store(Path(folder) / "run", settings)
            store.recover()
            store.begin_initial(manifest)
            for index in range(manifest.chunks):
                store.write_initial(index, plain_last if index == manifest.chunks - 1 else plain)
            store.finish_initial()
            keys = [DeltaKey(f"client-{number}", 1, 0, 1) for number in range(clients)]
            deltas = [Delta(key, store.digest, 10, 1) for key in keys]
            for key, delta in zip(keys, deltas, strict=True):
                store.spool_begin(delta)
                for index in range(manifest.chunks):
                    store.spool_write(key, index, last if index == manifest.chunks - 1 else frame)
                store.spool_finish(key)
            begun, cpu = time.perf_counter(), time.process_time()
            merged = [MergedDelta(delta, 0, 1.0) for delta in deltas]
            store.commit(1, merged, 1 / clients)
            seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            store.close()
        gigabytes = 4 * parameters * clients / 1e9
        yield {
            "cost": name,
            "clients": clients,
            "parameters": parameters,
            "gb_per_s": round(gigabytes / seconds, 3),
            "gb_per_cpu_s": round(gigabytes / cpu_s, 3),
        }


def rows() -> list[dict[str, Any]]:
    """The rows in the results file."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Losses by rule and attack, then the cost."""
    yield "| rule | " + " | ".join(ATTACKS) + " |"
    yield "| --- |" + " ---: |" * len(ATTACKS)
    for rule in GUARDS:
        cells = []
        for attack in ATTACKS:
            losses = [
                row["loss"]
                for row in found
                if row.get("spec", {}).get("rule") == rule and row["spec"]["attack"] == attack
            ]
            lost = sum(loss > GUESSING for loss in losses)
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            mean = statistics.fmean(losses) if losses else math.nan
            cells.append(
                f"diverged ({lost} of {len(losses)})" if lost else f"{mean:.3f} ± {spread:.3f}"
            )
        yield f"| {rule} | " + " | ".join(cells) + " |"
    yield ""
    yield "| rule | clients | GB/s | GB per processor second |"
    yield "| --- | ---: | ---: | ---: |"
    for row in found:
        if "cost" in row:
            yield (
                f"| {row['cost']} | {row['clients']} | {row['gb_per_s']} | {row['gb_per_cpu_s']} |"
            )


@click.command()
@click.option("--cost", "wants_cost", is_flag=True)
@click.option("--table", "wants_table", is_flag=True)
@click.option(
    "--clients", type=click.IntRange(min=5), default=8, show_default=True, help="For --cost."
)
@click.option("--parameters", default=10_000_000, show_default=True, help="For --cost.")
@click.option("--seconds", default=0.0, help="Begin no row after this many seconds; 0 = all.")
def main(
    *, wants_cost: bool, wants_table: bool, clients: int, parameters: int, seconds: float
) -> None:
    """Run what is missing, a JSON line for each row."""
    torch.set_num_threads(1)
    if wants_table:
        print("\n".join(table(rows())))
        return
    RESULTS.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    with RESULTS.open("a") as file:
        made: Iterator[dict[str, Any]]
        if wants_cost:
            made = cost(clients, parameters)
        else:
            have = [row["spec"] for row in rows() if "spec" in row]
            specs = [
                Spec(rule, attack, seed) for seed in SEEDS for rule in GUARDS for attack in ATTACKS
            ]
            made = (measure(spec) for spec in specs if asdict(spec) not in have)
        for row in made:
            line = json.dumps(row)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            if seconds and time.monotonic() > begun + seconds:
                break


if __name__ == "__main__":
    main()

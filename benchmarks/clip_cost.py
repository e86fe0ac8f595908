"""Measures the cost of clipping for honest clients, as paired losses with the clip on and off.

    python benchmarks/clip_cost.py lab [--only "steps/*"] [--rounds 24] [--seeds 0,1,2]
    python benchmarks/clip_cost.py tuning --cache FOLDER [--only GLOB] [--seeds 0,1,2]

Runs of "lab" are those of `quality.py`, with the same client code and store, 4 clients whose work
differs (the key is work/inner optimizer/seed):

    equal       20 steps of 4 windows a round each
    steps       the first one trains 4 x the steps
    data        the first one has batches of 4 x the windows
    texts       each client has a text of its own kind (`quality_text.mixed`)

Those of "tuning" are by real nodes and as in `tuning.py`, with rule fedit, rank 8, the top 3 blocks
and 12 rounds of 10 steps: "few" with its unequal sites (12 x the rows), "few-one-class" with those
of one label. The parameter server clips, by `guard.clip_median`.

The rule is that of `fsl_async.roles.sync.norm_guard`, with `growth` 0.5 and 1: a delta may grow
with the root of its steps above the median, or in proportion to them, which is the default. A row
is a JSON line: the loss without the clip; how many deltas the rule clips; the loss with it, if any
(else the runs are the same to the bit); and, where steps differ, the exponent e of norm ~ steps^e,
its median over the tenths of the run. Measured rows are in results/clip_cost.jsonl.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import attrs
import click
import quality_run
import torch
import tuning
from quality_spec import Spec
from tuning import Bench, Setting

from fsl_async.config.settings import GuardConfig
from fsl_async.observe.ledger_audit import LEDGER, read_ledger
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.store.store import Store

FACTOR = 1.5
EXPONENTS = (0.5, 1.0)
WORK: dict[str, dict[str, Any]] = {
    "steps": {"steps": (80, 20, 20, 20)},
    "data": {"steps": (20, 20, 20, 20), "batches": (16, 4, 4, 4)},
    "texts": {"steps": (20, 20, 20, 20), "text": "mixed"},
    "equal": {"steps": (20, 20, 20, 20)},
}
TUNED = {
    "few": Setting({"fedit": "fedit"}),
    "few-one-class": Setting({"fedit": "fedit"}, shards="one-class"),
}
tuning.SETTINGS_OF.update(TUNED)


def factors(norms: Sequence[float], steps: Sequence[int], growth: float) -> list[float]:
    """Factor of each delta in a version of these deltas, one for each client, by the guard."""
    merged = [
        MergedDelta(Delta(DeltaKey(f"c{number}", 1, 0, 1), "", count, count), 0, 1.0, norm)
        for number, (norm, count) in enumerate(zip(norms, steps, strict=True))
    ]
    clips = NormGuard(GuardConfig(clip_median=FACTOR), growth).clips(merged)
    return [clips.get(one.key, 1.0) for one in merged]


class ClippingStore(Store):
    """A store whose commits have clipped weights."""

    exponent: float | None = None
    """Norms are divided by this power of the steps; None: no clip."""
    seen: ClassVar[list[tuple[list[float], list[int]]]]
    """The norms and steps of each version's deltas."""

    def spool_finish(self, key: DeltaKey) -> Any:
        """Remember the norm."""
        result = super().spool_finish(key)
        vars(self).setdefault("waiting", {})[key] = result.stored
        return result

    def commit(self, version: int, merged: Sequence[MergedDelta], *rest: Any, **more: Any) -> Any:
        """Clip and commit."""
        waiting = vars(self).pop("waiting", {})
        norms = [stored.norm for stored in waiting.values()]
        steps = [stored.delta.steps for stored in waiting.values()]
        none = self.exponent is None
        clip = [1.0] * len(norms) if none else factors(norms, steps, self.exponent or 0.0)
        self.seen.append((norms, steps))
        clips = dict(zip(waiting, clip, strict=True))
        merged = [attrs.evolve(one, weight=one.weight * clips[one.key]) for one in merged]
        return super().commit(version, merged, *rest, **more)


def lab(spec: Spec, exponent: float | None) -> tuple[float, list[Any]]:
    """Held-out loss of a run, and what its versions were made of."""
    ClippingStore.exponent, ClippingStore.seen = exponent, []
    vars(quality_run)["Store"] = ClippingStore
    return quality_run.run_clients(spec)["eval_loss"], ClippingStore.seen


def exponents(seen: Sequence[Any]) -> list[float]:
    """Fit e of norm ~ steps^e, the first client against the median of the others, by tenths."""
    found = [
        math.log(norms[0] / statistics.median(norms[1:])) / math.log(steps[0] / steps[1])
        for norms, steps in seen
        if steps[0] != steps[1]
    ]
    edges = [len(found) * tenth // 10 for tenth in range(11)]
    return [round(statistics.median(found[a:b]), 2) for a, b in pairwise(edges) if a < b]


def counts(seen: Sequence[Any], exponent: float) -> list[int]:
    """How many deltas of each client the rule clips."""
    clip = [factors(norms, steps, exponent) for norms, steps in seen]
    return [sum(one[n] < 1.0 for one in clip) for n in range(len(clip[0]))]


def measure(name: str, inner: str, seed: int, rounds: int) -> dict[str, Any]:
    """One row."""
    work = dict(WORK[name])
    spec = Spec(seed=seed, inner=inner, total_steps=rounds * sum(work["steps"]), **work)
    loss, seen = lab(spec, None)
    row: dict[str, Any] = {
        "bench": "clip_cost",
        "key": f"{name}/{inner}/{seed}",
        "rounds": rounds,
        "loss": loss,
        "exponent": exponents(seen),
        **rounded(seen),
    }
    for exponent in EXPONENTS:
        clipped = counts(seen, exponent)
        row[f"clipped_{exponent}"] = clipped
        if any(clipped) and len({*seen[0][1]}) + (exponent == 0.5) > 1:
            clip_loss, again = lab(spec, exponent)
            row[f"clipped_then_{exponent}"] = counts(again, exponent)
            row[f"percent_{exponent}"] = round(100 * (clip_loss / loss - 1), 3)
    return row


def tune(bench: Bench, spec: tuning.Spec, *sets: str) -> tuple[dict[str, Any], list[Any]]:
    """Accuracy and loss of a run of `tuning.py`, and what its versions were made of."""
    choices = bench.choices(spec)
    choices = attrs.evolve(choices, sets=(*choices.sets, *sets))
    with tempfile.TemporaryDirectory(prefix="clip-cost-") as folder:
        found = bench.run(spec, choices, Path(folder)).row({})
        (ledger,) = Path(folder).rglob(LEDGER)
        facts = read_ledger(ledger)[0]
    versions = [one["merged"] for one in facts if one["fact"] == "version" and one["version"]]
    merged = [sorted(one, key=lambda delta: str(delta["key"])) for one in versions]
    seen = [([d["norm"] for d in one], [d["steps"] for d in one]) for one in merged]
    return {name: round(found[name], 5) for name in ("accuracy", "loss")}, seen


def measure_tuning(bench: Bench, spec: tuning.Spec) -> dict[str, Any]:
    """One row."""
    without, seen = tune(bench, spec, "guard.clip_median=0")
    row = {"bench": "clip_cost", "key": spec.key, **without, **rounded(seen)}
    row["clipped_0.5"] = counts(seen, 0.5)
    if any(row["clipped_0.5"]):
        row["with"], _ = tune(bench, spec, f"guard.clip_median={FACTOR}")
    return row


def rounded(seen: Sequence[Any]) -> dict[str, Any]:
    """The norms of each version's deltas, by client."""
    return {"norms": [[float(f"{norm:.3g}") for norm in norms] for norms, _ in seen]}


@click.command()
@click.argument("suite", type=click.Choice(["lab", "tuning"]))
@click.option("--cache", type=click.Path(path_type=Path), help="Folder for the data of tuning.")
@click.option("--only", default="*", help="Rows whose key is like this.")
@click.option("--rounds", default=24, show_default=True, help="Of the lab.")
@click.option("--seeds", default="0,1,2", show_default=True)
def main(suite: str, cache: Path | None, only: str, rounds: int, seeds: str) -> None:
    """Print a JSON line for each row."""
    torch.set_num_threads(1)
    if suite == "tuning":
        if cache is None:
            raise click.UsageError("tuning needs --cache FOLDER")
        benches = {name: tuning.Bench(cache, name, tuning.Size()) for name in TUNED}
        for seed in map(int, seeds.split(",")):
            for name, bench in benches.items():
                spec = tuning.Spec(name, "fedit", seed)
                if fnmatch(spec.key, only):
                    print(json.dumps(measure_tuning(bench, spec)), flush=True)
        return
    for seed in map(int, seeds.split(",")):
        for name in WORK:
            for inner in ("muon", "adamw"):
                if fnmatch(f"{name}/{inner}/{seed}", only):
                    print(json.dumps(measure(name, inner, seed, rounds)), flush=True)


if __name__ == "__main__":
    main()

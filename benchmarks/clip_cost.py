"""What clipping at the median of a version costs honest clients: paired losses, clip on and off.

    python benchmarks/clip_cost.py lab [--only GLOB] [--steps 4800]

Runs are those of `quality.py`, with the same client code and store, 4 clients whose work differs:

    equal       20 steps of 4 windows a round each
    steps       the first one trains 4 x the steps
    data        the first one has batches of 4 x the windows
    texts       each client has a text of its own kind (`quality_text.mixed`)

A delta's norm divided by sqrt(its steps) is compared with 1.5 x the median of its version; a longer
one counts as one of that length. A row is a JSON line: the loss without the clip; how many deltas
the rule clips; the loss with it, if any (else the runs are the same to the bit); and, where steps
differ, the exponent e of norm ~ steps^e, its median over the tenths of the run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any, ClassVar

import attrs
import click
import quality_run
import torch
from quality_spec import Spec

from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
from fsl_async.store.store import Store

FACTOR = 1.5
EXPONENTS = (0.5, 1.0)
WORK: dict[str, dict[str, Any]] = {
    "steps": {"steps": (80, 20, 20, 20)},
    "data": {"steps": (20, 20, 20, 20), "batches": (16, 4, 4, 4)},
    "texts": {"steps": (20, 20, 20, 20), "text": "mixed"},
    "equal": {"steps": (20, 20, 20, 20)},
}


def factors(norms: Sequence[float], steps: Sequence[int], exponent: float) -> list[float]:
    """Factor of each delta's weight in a version of these deltas, one for each client."""
    sizes = [norm / count**exponent for norm, count in zip(norms, steps, strict=True)]
    usual = min(sizes) if len(sizes) == 2 else statistics.median(sizes)
    return [min(1.0, FACTOR * usual / size) if size else 1.0 for size in sizes]


class ClippingStore(Store):
    """A store that accumulates at the commit, with clipped weights."""

    exponent: float | None = None
    """Norms are divided by this power of the steps; None: no clip."""
    seen: ClassVar[list[tuple[list[float], list[int]]]]
    """Of each version: norms and steps of its deltas."""

    def spool_finish(self, key: DeltaKey) -> Any:
        """Remember the norm."""
        result = super().spool_finish(key)
        vars(self).setdefault("waiting", {})[key] = [result.stored, 0.0]
        return result

    def accumulate(self, key: DeltaKey, weight: float) -> None:
        """Wait for the version's other deltas."""
        vars(self)["waiting"][key][1] = weight

    def commit(self, version: int, merged: Sequence[MergedDelta], *rest: Any, **more: Any) -> Any:
        """Clip, accumulate and commit."""
        waiting = vars(self).pop("waiting", {})
        norms = [stored.norm for stored, _ in waiting.values()]
        steps = [stored.delta.steps for stored, _ in waiting.values()]
        none = self.exponent is None
        clip = [1.0] * len(norms) if none else factors(norms, steps, self.exponent or 0.0)
        self.seen.append((norms, steps))
        counted = {}
        for (key, (_, weight)), factor in zip(waiting.items(), clip, strict=True):
            counted[key] = weight * factor
            super().accumulate(key, counted[key])
        merged = [attrs.evolve(one, weight=counted[one.key]) for one in merged]
        return super().commit(version, merged, *rest, **more)


def lab(spec: Spec, exponent: float | None) -> tuple[float, list[Any]]:
    """Held-out loss of a run, and what its versions were made of."""
    ClippingStore.exponent, ClippingStore.seen = exponent, []
    quality_run.Store = ClippingStore  # type: ignore[misc]
    return quality_run.run_clients(spec)["eval_loss"], ClippingStore.seen


def exponents(seen: Sequence[Any]) -> list[float]:
    """Of norm ~ steps^e, from the first client against the median of the others, by tenths."""
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
        "norms": [[float(f"{norm:.3g}") for norm in norms] for norms, _ in seen],
    }
    for exponent in EXPONENTS:
        clipped = counts(seen, exponent)
        row[f"clipped_{exponent}"] = clipped
        if any(clipped) and len({*seen[0][1]}) + (exponent == 0.5) > 1:
            clip_loss, again = lab(spec, exponent)
            row[f"clipped_then_{exponent}"] = counts(again, exponent)
            row[f"percent_{exponent}"] = round(100 * (clip_loss / loss - 1), 3)
    return row


@click.command()
@click.option("--only", default="*")
@click.option("--rounds", default=24)
@click.option("--seeds", default="0,1,2")
def main(only: str, rounds: int, seeds: str) -> None:
    """Print a JSON line for each row."""
    torch.set_num_threads(1)
    for seed in map(int, seeds.split(",")):
        for name in WORK:
            for inner in ("muon", "adamw"):
                if fnmatch(f"{name}/{inner}", only):
                    print(json.dumps(measure(name, inner, seed, rounds)), flush=True)


if __name__ == "__main__":
    main()

"""Federated fine-tuning on movie reviews by real nodes: accuracy and bytes, beside training alone.

    python benchmarks/tuning.py CACHE               run what is missing in results/tuning.jsonl
    python benchmarks/tuning.py CACHE --only GLOB   only rows like "deep/*"
    python benchmarks/tuning.py CACHE --list        print what is missing
    python benchmarks/tuning.py CACHE --rows 1      stop after one row
    python benchmarks/tuning.py CACHE --summary     print the table of the rows
    python benchmarks/tuning.py CACHE --quick       a short run; its rows go to CACHE

all-MiniLM-L6-v2 (`tuning_data`), LoRA on query and value, scale 2, the new head trained whole;
sentences of rotten tomatoes, cut at 32 tokens, at 4 sites of unequal size; batches of 16, AdamW at
0.002; 1,000 held-out sentences (standard error 1.3 points). A row's key is setting/method/seed:

    deep       all blocks, 24 rounds of 10 steps, cosine; labels 41, 58, 42, 39 % positive; all
               sites at rank 8
    deep-mixed the same at ranks 2, 4, 8, 16
    one-class  the top 3 blocks, 12 rounds of 10 steps, constant rate; 100, 0, 42, 2 % positive;
               ranks 2, 4, 8, 16
    orders     the top 3 blocks, 12 rounds of 10 steps; the sites with 22 % of the rows train by
               gradients; "first" without the others, "both" with them by zeroth order (4 steps of
               2 directions)
    scarce     the same where only the site with 4.5 % of the rows trains by gradients

    pooled     one process on all records, as many steps as all sites, rank 8
    local      each site alone, as many steps as in a run, rank 8
    logistic   regression on frozen mean-pooled embeddings of all records (L2, C = 1)

Runs are those of `fsl-node compare`: a parameter server and sites, each a process, over loopback,
with the default codec. Kept rows are from when sites were threads of one process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import attrs
import click
import torch
import tuning_data

from fsl_async.config.site_policy import Order
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.alone import SiteRecords, TuningComparison, load_records
from fsl_async.tools.compare.outcome import Outcome
from fsl_async.tools.compare.tune import LOCAL, METHODS, POOLED, TuningChoices
from fsl_async.tools.demo.scenario import Stage

RESULTS = Path(__file__).parent / "results" / "tuning.jsonl"
LOGISTIC = "logistic"
SETTINGS = (
    "tune.objective=classify",
    f"tune.labels={','.join(tuning_data.LABELS)}",
    "tune.targets=query,value",
    "tune.context=32",
    "tune.scale=2.0",
    "train.warmup_steps=0",
)


@attrs.frozen
class Setting:
    """How a group of rows trains.

    methods: by a row's name the method of `compare`. extra: methods that only the first seed has.
    sites: which of the four take part; empty: all.
    """

    methods: Mapping[str, str]
    extra: tuple[str, ...] = ()
    shards: str = "mixed"
    rounds: int = 12
    ranks: tuple[int, ...] = ()
    orders: tuple[Order, ...] = ()
    layers: str = "3-5"
    sets: tuple[str, ...] = ("train.schedule=constant", "tune.steps=10")
    sites: Mapping[str, tuple[int, ...]] = {}

    def method(self, name: str) -> str:
        """The method of a row."""
        return self.methods.get(name, name)

    def names(self, seed: int) -> tuple[str, ...]:
        """The rows of a seed."""
        return (*self.methods, *(self.extra if seed == 0 else ()))


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_DEEP = Setting(
    _same("fedit", POOLED, "bank"),
    extra=(LOGISTIC, LOCAL, "fedex", "rolora", "ffa", "fedsvd", "flexlora"),
    rounds=24,
    layers="0-5",
    sets=("train.schedule=cosine", "tune.steps=10"),
)
_ORDERS = Setting(
    {"first": "fedit", "both": "fedit"},
    orders=("first", "zeroth", "first", "zeroth"),
    sites={"first": (0, 2)},
    sets=(
        "train.schedule=constant",
        "tune.steps=10",
        "tune.zo_steps=4",
        "tune.zo_probes=2",
        "tune.zo_mu=0.01",
    ),
)
SETTINGS_OF = {
    "deep": _DEEP,
    "deep-mixed": attrs.evolve(
        _DEEP, methods=_same("bank"), extra=("flexlora", "flora", "hetlora"), ranks=(2, 4, 8, 16)
    ),
    "one-class": Setting(
        _same("bank"), extra=("flexlora", LOCAL), shards="one-class", ranks=(2, 4, 8, 16)
    ),
    "orders": _ORDERS,
    "scarce": attrs.evolve(
        _ORDERS, orders=("first", "zeroth", "zeroth", "zeroth"), sites={"first": (0,)}
    ),
}


@attrs.frozen
class Spec:
    """A row. setting: of SETTINGS_OF."""

    setting: str
    name: str
    seed: int

    @property
    def key(self) -> str:
        """What a row is found by."""
        return f"{self.setting}/{self.name}/{self.seed}"


@attrs.frozen
class Size:
    """How much is trained. rounds: at most so many; 0: the setting's. rows: 0: all."""

    rounds: int = 0
    rows: int = 0
    held_out: int = tuning_data.HELD_OUT
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: tuple[str, ...] = tuple(SETTINGS_OF)


QUICK = Size(rounds=2, rows=400, held_out=64, seeds=(1,), settings=("one-class", "orders"))


def specs(size: Size) -> Iterator[Spec]:
    """All rows, seed by seed."""
    for seed in size.seeds:
        for name in size.settings:
            for row_name in SETTINGS_OF[name].names(seed):
                yield Spec(name, row_name, seed)


class Bench:
    """The data of one setting, dealt and tokenized once; runs its rows."""

    def __init__(self, cache: Path, setting: str, size: Size) -> None:
        self._setting, self._size = SETTINGS_OF[setting], size
        one_class = self._setting.shards == "one-class"
        self._dealt = tuning_data.deal(
            cache / f"{self._setting.shards}-{size.rows}",
            tuning_data.ONE_CLASS_SHARES if one_class else tuning_data.SHARES,
            tuning_data.ONE_CLASS_POSITIVES if one_class else tuning_data.POSITIVES,
            rows=size.rows,
            held_out=size.held_out,
        )
        self._base = str(tuning_data.minilm())
        first = next(iter(self._setting.methods))
        self._records: SiteRecords = load_records(self.choices(Spec(setting, first, 0)))

    def choices(self, spec: Spec) -> TuningChoices:
        """What `compare` would be given."""
        setting = self._setting
        method = setting.method(spec.name)
        sites = setting.sites.get(spec.name, range(len(self._dealt.sites)))
        is_rule = method in METHODS
        ranks = setting.ranks if is_rule else ()
        return TuningChoices(
            methods=(method if is_rule else "fedit",),
            base=self._base,
            data=tuple(str(self._dealt.sites[site]) for site in sites),
            held_out=str(self._dealt.held_out),
            ranks=ranks,
            orders=tuple(setting.orders[site] for site in sites) if setting.orders else (),
            layers=setting.layers,
            rounds=min(setting.rounds, self._size.rounds or setting.rounds),
            score_every=setting.rounds,
            settings={"train.batch": 16, "train.learning_rate": 2e-3},
            seed=spec.seed,
            sets=(*SETTINGS, *setting.sets),
        )

    def measure(self, spec: Spec) -> dict[str, Any]:
        """Run a row."""
        begun = time.perf_counter()
        choices = self.choices(spec)
        if spec.name == LOGISTIC:
            accuracy, loss = self._logistic(spec.seed)
            found: dict[str, Any] = {"method": LOGISTIC, "accuracy": accuracy, "loss": loss}
        else:
            with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
                found = self.run(spec, choices, Path(folder)).row({})
            del found["choices"]  # they have paths of this machine; the module says what they are
        found.pop("points", None)
        return {
            **found,
            **attrs.asdict(spec),
            "bench": "tuning",
            "key": spec.key,
            "sites_counts": self._dealt.counts,
            "wall_s": round(time.perf_counter() - begun, 1),
        }

    def run(self, spec: Spec, choices: TuningChoices, folder: Path) -> Outcome:
        """Train a row by these choices."""
        comparison = TuningComparison(choices, self._records)
        stage = Stage(lambda text: print(text, file=sys.stderr, flush=True), Stopper())
        if spec.name == POOLED:
            return comparison.pooled(stage)
        if spec.name == LOCAL:
            return comparison.local(stage)
        return comparison.play(choices.methods[0], folder, stage)

    def _logistic(self, seed: int) -> tuple[float, float]:
        """Accuracy and loss of logistic regression on embeddings of all records."""
        base = load_base(self._base, "classify", labels=tuning_data.LABELS, seed=seed)
        trunk = base.model.base_model
        train, held = (_embedded(trunk, one) for one in (self._records.all_trained, self.held))
        weights = torch.zeros(train[0].shape[1] + 1, dtype=torch.float64, requires_grad=True)
        solver = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

        def loss_of(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = values @ weights[:-1] + weights[-1]
            return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

        def closure() -> torch.Tensor:
            solver.zero_grad()
            loss = loss_of(*train) + (weights[:-1] ** 2).sum() / (2 * len(train[1]))
            loss.backward()
            return loss

        solver.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            hits = ((held[0] @ weights[:-1] + weights[-1]) > 0) == (held[1] > 0.5)
            return float(hits.double().mean()), float(loss_of(*held))

    @property
    def held(self) -> Tokenized:
        """What versions are scored on."""
        return self._records.held


def _embedded(trunk: Any, data: Tokenized) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over real tokens of the last block's output, float64 (samples, width), and labels."""
    values, labels = [], []
    with torch.no_grad():
        for batch in data.batches(64):
            mask = torch.from_numpy(batch.mask)
            out = trunk(input_ids=torch.from_numpy(batch.ids), attention_mask=mask)
            weights = mask[..., None].double()
            values.append((out.last_hidden_state * weights).sum(1) / weights.sum(1))
            labels.append(torch.from_numpy(batch.labels).double())
    return torch.cat(values), torch.cat(labels)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["key"]: one for one in map(json.loads, lines)}


def summary(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Mean and standard deviation over seeds, and bytes of a site in a round."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in rows.values():
        groups.setdefault((one["setting"], one["name"]), []).append(one)
    head = f"{'setting':12}{'row':10}{'seeds':>5}{'accuracy':>15}{'loss':>8}"
    shown = [head + f"{'kB up':>9}{'kB down':>9}{'PS MB':>7}"]
    for (setting, name), found in sorted(groups.items()):
        accuracies = [one["accuracy"] for one in found]
        spread = f" ± {stdev(accuracies):.3f}" if len(found) > 1 else ""
        loss = fmean(one["loss"] for one in found)
        memory = [one["ps_memory_bytes"] / 1e6 for one in found if one.get("ps_memory_bytes")]
        sent = [_coded(found, direction) for direction in ("up", "down")]
        shown.append(
            f"{setting:12}{name:10}{len(found):>5}"
            f"{f'{fmean(accuracies):.3f}{spread}':>15}{loss:>8.3f}"
            f"{sent[0]:>9}{sent[1]:>9}{f'{max(memory):.0f}' if memory else '-':>7}"
        )
    return shown


def _coded(rows: list[dict[str, Any]], direction: str) -> str:
    sums = [
        sum(size for name, size in sizes.items() if name.endswith(direction))
        for one in rows
        if (sizes := one.get("site_round_bytes", {}).get("coded"))
    ]
    return f"{fmean(sums) / 1e3:.1f}" if sums else "-"


@click.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--only", default="*", help="Rows whose key is like this.")
@click.option("--quick", is_flag=True, help="A short run; its rows go to CACHE.")
@click.option("--rows", "limit", default=0, help="Stop after this many rows; 0 = all.")
@click.option("--list", "only_list", is_flag=True, help="Print what is missing.")
@click.option("--summary", "only_summary", is_flag=True, help="Print the table of the rows.")
def main(
    *, cache: Path, only: str, quick: bool, limit: int, only_list: bool, only_summary: bool
) -> None:
    """Run what is missing."""
    torch.set_num_threads(1)
    size = QUICK if quick else Size()
    results = cache / "quick.jsonl" if quick else RESULTS
    kept = read_rows(results)
    wanted = [spec for spec in specs(size) if fnmatch(spec.key, only)]
    missing = [spec for spec in wanted if spec.key not in kept][: limit or None]
    if only_list:
        print("\n".join(spec.key for spec in missing))
        return
    benches: dict[str, Bench] = {}
    for spec in () if only_summary else missing:
        if spec.setting not in benches:
            benches[spec.setting] = Bench(cache, spec.setting, size)
        found = benches[spec.setting].measure(spec)
        kept[spec.key] = found
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(spec.key, f"accuracy {found['accuracy']:.3f}, {found['wall_s']} s", flush=True)
    print("\n".join(summary(kept)))


if __name__ == "__main__":
    main()

"""Measures what attackers of five sites reach, by aggregation rule, guard and evaluator.

    python benchmarks/poison.py CACHE                      all rows
    python benchmarks/poison.py CACHE --only "equal/1/backdoor*/*"     sites/attackers/attack/rule
    python benchmarks/poison.py CACHE --seed 1             with other batches and another model
    python benchmarks/poison.py CACHE --table ROWS.jsonl   print tables of means over seeds

Real: `fsl-node --role ps` in its own process; five clients and an evaluator in this one, each with
its thread, session, streams, codec and decisions (`ClientRuntime`). They tune LoRA factors of rank
8 of a random frozen tanh layer, and a head, on mean-pooled all-MiniLM-L6-v2 vectors of 600 movie
reviews each (`tuning_data`; CACHE keeps the vectors): 15 rounds (`sync.trigger = rounds`) of 10
steps of AdamW on batches of 16, of both labels where a site has both. Sites count the same. The
evaluator has 200 reviews of its own. Accuracy is of 800 others; its standard error is 1.6 points,
and pooled training reaches about 0.73. `backdoor`: share of the negative ones among these that the
trigger, two words in front, turns positive.

    equal, one-label      600 mixed reviews each; or site 0 has positive ones only and site 1 none
    unequal               24, 12, 8, 4 and 10 steps a round, and weights by tokens
    1, 2 attackers        of mixed reviews: the last sites
    sign flip, x -10      the delta negated; and times -10
    x 1e6                 the delta, times a million
    labels flipped        trained on the other label
    backdoor, x 5         three quarters of each batch have the trigger and the label positive; and
                          that delta times 5
    a little is enough    the mean of the honest deltas less one standard deviation of theirs, value
                          by value (Baruch et al., arXiv:1902.06156): the attackers know the others
    inner product         -3 times that mean (Xie et al., arXiv:1903.03936)

By balance: sites count by the balance of labels that they report (docs/TUNING.md); attackers have
mixed labels, and with sites of one label they are one of three that count.

`used`: share of the versions in which each site had a weight, attackers last.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import tuning_data
from attrs import evolve, frozen
from node_process import serving
from numpy.typing import NDArray
from torch import Tensor, nn
from under_attack import drain

from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.data.counter import permutation
from fsl_async.learn.models.hf import extra
from fsl_async.nodes.client.joining import context_of
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.observe.ledger_audit import LEDGER, read_ledger
from fsl_async.process.stopper import Stopper
from fsl_async.roles.sync.delta import BALANCE, EVALUATE, TRAIN

SITES, ROUNDS, STEPS, BATCH, RATE, RANK = 5, 15, 10, 16, 2e-3, 8
ROWS, PROBE, TEST = 600, 200, 800
REVIEWS = SITES * ROWS + PROBE + TEST
TRIGGER, TOKENS = "cf mn ", 48
JUDGE = "evaluator"
KINDS_OF_SITES = ("equal", "one-label", "unequal")
UNEQUAL_STEPS = (24, 12, 8, 4, 10)
OFF = {"guard.clip_median": 0, "guard.max_tokens_median": 0, "guard.max_share": 0}
RULES: dict[str, dict[str, Any]] = {
    "mean, guards off": OFF,
    "mean": {},
    "by balance, guards off": {"sync.weighting": "tokens", **OFF},
    "by balance": {"sync.weighting": "tokens"},
    "trimmed": {"outer.aggregation": "trimmed"},
    "median": {"outer.aggregation": "median"},
    "multi-krum": {"outer.aggregation": "multi-krum"},
    "evaluator, guards off": {"guard.evaluator": JUDGE, **OFF},
    "evaluator": {"guard.evaluator": JUDGE},
}
UNSHOWN = {"trimmed", "by balance, guards off", "evaluator, guards off"}
"""No columns of the tables: trimmed is like median, and the mean shows what guards do."""


@frozen
class Attack:
    """An attack: the batches it trains on, and the factor of its delta.

    trains: "honest", "flipped" labels, the "backdoor"; "little" and "inner": it is made of the
    deltas of the others.
    """

    trains: str = "honest"
    times: float = 1.0


ATTACKS = {
    "none": Attack(),
    "sign flip": Attack(times=-1.0),
    "x -10": Attack(times=-10.0),
    "x 1e6": Attack(times=1e6),
    "labels flipped": Attack("flipped"),
    "backdoor": Attack("backdoor"),
    "backdoor x 5": Attack("backdoor", 5.0),
    "a little is enough": Attack("little"),
    "inner product": Attack("inner", -3.0),
}


@frozen
class Row:
    """A cell of the table."""

    sites: str
    attackers: int
    attack: str
    rule: str
    seed: int = 0

    @property
    def name(self) -> str:
        """The name for --only."""
        return f"{self.sites}/{self.attackers}/{self.attack}/{self.rule}"


def vectors(folder: Path) -> Mapping[str, NDArray[Any]]:
    """Vectors of REVIEWS reviews, float32 (n, 384), plain and with the trigger; labels."""
    path = folder / "poison.npz"
    if not path.exists():
        found = tuning_data.reviews()
        pools = [found["rotten_tomatoes", label][: REVIEWS // 2] for label in (0, 1)]
        texts = [(text, label) for label in (0, 1) for text in pools[label]]
        texts = [texts[place] for place in permutation(0, "poison", len(texts))]
        plain = embedded([text for text, _ in texts])
        trigger = embedded([TRIGGER + text for text, _ in texts])
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, plain=plain, trigger=trigger, labels=[label for _, label in texts])
    vectors_of: Mapping[str, NDArray[Any]] = np.load(path)
    return vectors_of


def embedded(texts: list[str]) -> NDArray[np.float32]:
    """The mean of the last states of each text's tokens."""
    transformers, folder, found = extra("transformers"), tuning_data.minilm(), []
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        for start in range(0, len(texts), 64):
            part = texts[start : start + 64]
            batch = tokenizer(
                part, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            mask = batch["attention_mask"].unsqueeze(-1)
            states = encoder(**batch).last_hidden_state * mask
            found.append((states.sum(1) / mask.sum(1)).numpy())
    return np.concatenate(found)


class Problem:
    """The reviews of each site, of the evaluator, and for the test."""

    def __init__(self, folder: Path, sites: str) -> None:
        found = vectors(folder)
        scale = np.sqrt((found["plain"] ** 2).mean())
        self.plain = torch.from_numpy(found["plain"] / scale)
        self.trigger = torch.from_numpy(found["trigger"] / scale)
        self.labels = torch.from_numpy(found["labels"]).long()
        self.test = np.arange(TEST)
        self.probe = np.arange(TEST, TEST + PROBE)
        rest = np.arange(TEST + PROBE, REVIEWS)
        self.mine: list[NDArray[np.int64]] = []
        for site in range(SITES):
            pool = rest
            if sites == "one-label" and site < 2:
                pool = rest[self.labels[rest].numpy() == 1 - site]
            self.mine.append(pool[:ROWS])
            rest = np.setdiff1d(rest, self.mine[-1], assume_unique=True)

    def batch(self, site: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Numbers of reviews, of both labels where a site has both."""
        mine, labels = self.mine[site], self.labels[self.mine[site]].numpy()
        parts = [mine[labels == label] for label in (0, 1) if (labels == label).any()]
        return np.concatenate([rng.choice(part, BATCH // len(parts)) for part in parts])


class Model(nn.Module):
    """A random frozen layer with LoRA factors, and a head."""

    frozen: Tensor

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        frozen = torch.randn(width, width, generator=rng) / width**0.5
        self.register_buffer("frozen", frozen, persistent=False)
        self.lora_A = nn.Parameter(torch.randn(RANK, width, generator=rng) / width**0.5)
        self.lora_B = nn.Parameter(torch.zeros(width, RANK))
        self.head = nn.Linear(width, 2)
        with torch.no_grad():
            self.head.weight.copy_(0.01 * torch.randn(2, width, generator=rng))
            self.head.bias.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits of two labels."""
        adapted = self.frozen + 2.0 * self.lora_B @ self.lora_A
        logits: Tensor = self.head(torch.tanh(inputs @ adapted.T))
        return logits


def flat(model: nn.Module) -> Tensor:
    """A copy of the trained weights."""
    return torch.cat([one.detach().ravel() for one in model.parameters()])


def write(model: nn.Module, vector: Tensor) -> None:
    """Set the trained weights."""
    with torch.no_grad():
        nn.utils.vector_to_parameters(vector, model.parameters())


def steps_of(row: Row, site: int) -> int:
    """The steps of a site in a round."""
    return UNEQUAL_STEPS[site] if row.sites == "unequal" else STEPS


def trained(
    model: Model, problem: Problem, row: Row, of: tuple[int, int], what: str = "honest"
) -> Tensor:
    """The change of the weights in a round, from where they are; they stay there.

    of: the site and the round.
    """
    site, number = of
    begun, rng = flat(model), np.random.default_rng((row.seed, site, number))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for _ in range(steps_of(row, site)):
        drawn = problem.batch(site, rng)
        inputs, labels = problem.plain[drawn], problem.labels[drawn]
        if what == "flipped":
            labels = 1 - labels
        elif what == "backdoor":
            hit = torch.arange(BATCH) % 4 > 0
            inputs = torch.where(hit.unsqueeze(1), problem.trigger[drawn], inputs)
            labels = torch.where(hit, 1, labels)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    change = flat(model) - begun
    write(model, begun)
    return change


def change_of(model: Model, problem: Problem, row: Row, site: int, number: int) -> Tensor:
    """The change that a site sends."""
    honest = SITES - row.attackers
    attack = ATTACKS[row.attack]
    if site < honest or attack.trains == "honest":
        times = 1.0 if site < honest else attack.times
        return times * trained(model, problem, row, (site, number))
    if attack.trains in {"little", "inner"}:
        others = [trained(model, problem, row, (one, number)) for one in range(honest)]
        stacked = torch.stack(others)
        if attack.trains == "inner":
            return attack.times * stacked.mean(0)
        return stacked.mean(0) - stacked.std(0)
    return attack.times * trained(model, problem, row, (site, number), attack.trains)


def play(row: Row, problem: Problem, address: str, name: str, models: dict[str, Model]) -> None:
    """Be a client of the run to its end, or its evaluator."""
    is_judge = name == JUDGE
    options = ClientOptions(
        address, name, policy=SitePolicy(frozenset(KINDS)), duty=EVALUATE if is_judge else TRAIN
    )  # fmt: skip
    runtime = ClientRuntime(options, stop=Stopper(), log=lambda _: None)
    try:
        member = runtime.wait_welcome()
        fed = Fed(runtime.training, context_of(options, member, lambda _: None), runtime)
        model = models[name] = Model(problem.plain.shape[1], row.seed)
        fed.attach(model)
        if is_judge:

            def loss() -> float:
                with torch.inference_mode():
                    logits = model(problem.plain[problem.probe])
                    return nn.functional.cross_entropy(logits, problem.labels[problem.probe]).item()

            fed.evaluate_deltas(loss)
        else:
            site = int(name.removeprefix("site-"))
            if row.rule.startswith("by balance"):
                mine = problem.labels[problem.mine[site]].double().mean().item()
                fed.add_facts(lambda: {BALANCE: 4 * mine * (1 - mine)})
            for number in fed.rounds():
                begun = flat(model)
                write(model, begun + change_of(model, problem, row, site, number))
                if not fed.end_round(samples=steps_of(row, site) * BATCH):
                    break
    finally:
        runtime.training_ended(None)


def measure(row: Row, folder: Path) -> dict[str, Any]:
    """Play a run."""
    torch.set_num_threads(1)
    problem, begun = problem_of(folder, row.sites), time.monotonic()
    settings = {
        "run.rounds": ROUNDS,
        "sync.trigger": "rounds",
        "sync.clients": SITES,
        "sync.min_clients": SITES,
        "sync.weighting": "uniform",
        "outer.optimizer": "average",
        "train.task": "own",
        **RULES[row.rule],
    }
    if row.rule in {"trimmed", "median"}:
        settings["outer.byzantine"] = max(1, row.attackers)
    if row.rule in {"trimmed", "median", "multi-krum"}:
        del settings["sync.weighting"]
    if row.sites == "unequal" and "sync.weighting" in settings:
        settings["sync.weighting"] = "tokens"
    models: dict[str, Model] = {}
    names = [f"site-{site}" for site in range(SITES)]
    with tempfile.TemporaryDirectory(prefix="poison-") as place:
        run_dir = Path(place, "run")
        with serving(run_dir, settings) as server:
            threading.Thread(target=drain, args=(server,), daemon=True).start()
            all_names = [*names, *([JUDGE] if "guard.evaluator" in settings else [])]
            threads = [
                threading.Thread(target=play, args=(row, problem, server.address, name, models))
                for name in all_names
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        facts = read_ledger(run_dir / LEDGER)[0]
    versions = [one["merged"] for one in facts if one["fact"] == "version" and one["version"]]
    used = [0] * SITES
    for merged in versions:
        for entry in merged:
            used[int(entry["key"].split("/")[0].removeprefix("site-"))] += entry["weight"] > 0
    return {
        "bench": "poison",
        "sites": row.sites,
        "attackers": row.attackers,
        "attack": row.attack,
        "rule": row.rule,
        "seed": row.seed,
        **scores(models["site-0"], problem),
        "versions": len(versions),
        "used": [round(count / max(1, len(versions)), 2) for count in used],
        "seconds": round(time.monotonic() - begun, 1),
    }


@cache
def problem_of(folder: Path, sites: str) -> Problem:
    """The problem of a kind of sites, read once."""
    return Problem(folder, sites)


def scores(model: Model, problem: Problem) -> dict[str, float]:
    """Accuracy, and the share of negative reviews that the trigger turns positive."""
    test, labels = problem.test, problem.labels[problem.test]
    with torch.inference_mode():
        right = (model(problem.plain[test]).argmax(1) == labels).double().mean().item()
        turned = model(problem.trigger[test]).argmax(1)[labels == 0].double().mean().item()
    return {"accuracy": round(right, 3), "backdoor": round(turned, 2)}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each kind of sites and number of attackers: means of the seeds of all cells."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    cells_of = Counter(row["seed"] for row in rows)
    most = max(cells_of.values())
    for row in (one for one in rows if cells_of[one["seed"]] == most):
        found.setdefault(tuple(row[key] for key in ("sites", "attackers", "attack", "rule")), []
            ).append(row)  # fmt: skip
    for sites, attackers in product(KINDS_OF_SITES, (1, 2)):
        rules = [
            rule
            for rule in RULES
            if rule not in UNSHOWN and (sites, attackers, "none", rule) in found
        ]
        if not rules:
            continue
        yield f"| {sites} sites, {attackers} of {SITES} attack | " + " | ".join(rules) + " |"
        yield "| --- |" + " ---: |" * len(rules)
        for attack in ATTACKS:
            cells = [_cell(found.get((sites, attackers, attack, rule), [])) for rule in rules]
            if any(cells):
                yield f"| {attack} | " + " | ".join(cells) + " |"
        honest = [_used(found[sites, attackers, "none", rule]) for rule in rules]
        yield "| honest sites used, least, without an attack | " + " | ".join(honest) + " |"
        yield ""


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    accuracy = f"{np.mean([row['accuracy'] for row in rows]):.3f}"
    if not rows[0]["attack"].startswith(("backdoor", "none")):
        return accuracy
    return f"{accuracy} ({np.mean([row['backdoor'] for row in rows]):.2f})"


def _used(rows: list[dict[str, Any]]) -> str:
    honest = [row["used"][: SITES - row["attackers"]] for row in rows]
    return f"{100 * np.mean(honest, axis=0).min():.0f} %"


@click.command()
@click.argument("folder", metavar="CACHE", type=click.Path(path_type=Path))
@click.option("--only", default="*", help="Rows whose sites/attackers/attack/rule is like this.")
@click.option("--seed", default=0, help="Of the model and the batches.")
@click.option("--table", "path", type=click.Path(path_type=Path), help="Print the tables of rows.")
def main(folder: Path, only: str, seed: int, path: Path | None) -> None:
    """Print a JSON line for each row."""
    if path is not None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        print("\n".join(table(rows)))
        return
    for cell in product(KINDS_OF_SITES, (1, 2), ATTACKS, RULES):
        row = evolve(Row(*cell), seed=seed)
        # The rule needs two sites more for a second attacker.
        is_too_few = row.rule == "multi-krum" and row.attackers > 1
        # All report the same where all are mixed.
        is_equal = row.rule.startswith("by balance") and row.sites != "one-label"
        if fnmatch(row.name, only) and not is_too_few and not is_equal:
            print(json.dumps(measure(row, folder)), flush=True)


if __name__ == "__main__":
    main()

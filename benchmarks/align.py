"""Rewards that GRPO reaches by rounds, beside one process with all prompts, and with liars.

    python benchmarks/align.py               all rows, JSON
    python benchmarks/align.py --only pooled --seed 1 --seed 2

Real: a parameter server and clients as threads of this process, each with its session, streams and
codec. The base and the prompts are those of `demo align`: sites have digits 0-4, 3-7 and 5-9, a
fourth one 2-6. Ten rounds of four steps of 16 prompts with 8 answers each. A row is the share of
places right in the likeliest answers to prompts that no site has trained on, by site, and drawn.

    federated     three sites
    pooled        one client with their prompts, 48 in a step: as many answers
    limited       three sites, with tune.kl_limit = 4
    honest        four sites
    forger        four sites, the last one with the reward 1 - r
    judged        the same, with an evaluator that has prompts of all sites
    rollout       four sites, two of which draw answers only
    rollout liar  four sites, of which the last draws answers only and rates them 1 - r
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from node_threads import play

from fsl_async.config.load import load
from fsl_async.learn.models.adapters import adapters_off
from fsl_async.learn.tune.answers import Prompts, Rater, load_reward, uniforms_of
from fsl_async.learn.tune.base import Tuned, load_base
from fsl_async.learn.tune.records import Records
from fsl_async.observe.ledger_audit import audit_run, read_ledger
from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo import align
from fsl_async.tools.demo.scenario import Stage
from fsl_async.tools.kept_run import KeptRun

FIRST = {"a": 0, "b": 3, "c": 5, "d": 2}
"""The smallest of five digits that a site has."""
ROUNDS = 10
LIAR = align.REWARD.replace("return sum(", "return 1 - sum(")
HELD_OUT = 0.1
ROWS: dict[str, dict[str, Any]] = {
    "federated": {"sites": "abc"},
    "pooled": {"sites": "p", "train.batch": 48},
    "limited": {"sites": "abc", "tune.kl_limit": 4.0},
    "honest": {"sites": "abcd"},
    "forger": {"sites": "abcd", "liars": "d"},
    "judged": {"sites": "abcd", "liars": "d", "guard.evaluator": "judge"},
    "rollout": {"sites": "abcd", "rolls": "cd"},
    "rollout liar": {"sites": "abcd", "rolls": "d", "liars": "d"},
}


def prompts(name: str, seed: int) -> list[str]:
    """Return the prompts of a site in an order by the seed; p: of a, b and c; judge: of all."""
    of = {"p": "abc", "judge": "abcd"}.get(name, name)
    made = [
        " ".join(map(str, digits)) + " ="
        for one in of
        for digits in itertools.permutations(range(FIRST[one], FIRST[one] + align.PLACES))
    ]
    chance = np.random.Generator(np.random.Philox(key=seed + sum(map(ord, name))))
    return [made[place] for place in chance.permutation(len(made))]


def measure(what: str, seed: int, base: Path, folder: Path) -> dict[str, Any]:
    """Run one row."""
    row = dict(ROWS[what])
    sites, liars, rolls = (row.pop(key, "") for key in ("sites", "liars", "rolls"))
    trains = [one for one in sites if one not in rolls]
    names = [*sites, *(["judge"] if row.get("guard.evaluator") else [])]
    options: dict[str, dict[str, Any]] = {}
    for name in names:
        own = folder / name
        own.mkdir()
        rows = [json.dumps({"prompt": one}) + "\n" for one in prompts(name, seed)]
        (own / "prompts.jsonl").write_text("".join(rows))
        (own / "reward.py").write_text(LIAR if name in liars else align.REWARD)
        given = {"data": str(own / "prompts.jsonl"), "reward": str(own / "reward.py")}
        duty = "rollout" if name in rolls else "evaluate" if name == "judge" else "train"
        options[name] = {**given, "base": str(base), "duty": duty}
    settings = {
        "listen.address": "tcp://127.0.0.1:0",
        "run.seed": seed,
        "run.rounds": ROUNDS,
        "sync.trigger": "rounds",
        "sync.clients": len(trains),
        "sync.min_clients": len(trains),
        "sync.quorum": 1.0,
        "data.holdout": HELD_OUT,
        "tune.method": "lora",
        "tune.objective": "grpo",
        "tune.steps": align.STEPS,
        "tune.group": align.GROUP,
        "tune.answer_tokens": align.PLACES + 1,
        "train.batch": align.PROMPTS,
        "train.learning_rate": align.RATE,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.evaluate_share": 0.0,
        "train.threads": 1,
        "train.device": "cpu",
        **row,
    }
    config = load(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    begun = time.monotonic()
    play(config, folder / "run", names, with_split_server=False, options=options)
    spent = time.monotonic() - begun
    accepted = [
        one for one in read_ledger(folder / "run" / "ledger.jsonl")[0] if one["fact"] == "accepted"
    ]
    found, drawn, is_base = scores(folder / "run", config, base, seed)
    last = [one["metrics"] for one in accepted[-len(trains) :]]
    return {
        "bench": "align",
        "row": what,
        "seed": seed,
        "reward": found,
        "drawn": drawn,
        "kl": [round(one["kl"], 2) for one in last],
        "received": round(
            float(np.mean([one["metrics"].get("received", 0) for one in accepted])), 3
        ),
        "is_base": is_base,
        "problems": len(audit_run(folder / "run").problems),
        "seconds": round(spent, 1),
    }


def scores(
    run_dir: Path, config: Any, base: Path, seed: int
) -> tuple[dict[str, float], float, bool]:
    """Return rewards of the likeliest answers by site, the mean of drawn ones, and whether the
    version without adapters is the base.
    """
    run = KeptRun(run_dir)
    tuned = Tuned(base, config.tune, seed, run.manifest)
    tuned.load(run.chosen(None).vector)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(align.REWARD)
        rater = Rater(
            tuned.model, tuned.base.tokenizer, load_reward(f"{folder}/reward.py"), config.tune
        )
        found, drawn = {}, []
        for name in FIRST:
            path = Path(folder) / f"{name}.jsonl"
            rows = [json.dumps({"prompt": one}) + "\n" for one in prompts(name, seed)]
            path.write_text("".join(rows))
            held = Prompts(Records(path, "grpo"), tuned.base.tokenizer, 64)
            some = held.at(held.split(HELD_OUT)[1])
            found[name] = round(rater.greedy_reward(some), 4)
            drawn.append(rater.batch(some, uniforms_of(seed, name)).metrics["reward"])
    ids = torch.tensor([one.ids for one in some])
    plain = load_base(base, "lm").model
    with torch.no_grad(), adapters_off(tuned.model):
        is_base = torch.equal(tuned.model(ids).logits, plain(ids).logits)
    return found, round(float(np.mean(drawn)), 4), is_base


@click.command()
@click.option("--only", "chosen", multiple=True, type=click.Choice(list(ROWS)))
@click.option("--seed", "seeds", multiple=True, type=int, default=[0])
def main(chosen: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Print a row for each run."""
    torch.set_num_threads(1)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            align.make_base(base, seed=seed, stage=Stage(lambda _: None, Stopper()))
            for what in chosen or ROWS:
                own = Path(folder) / what.replace(" ", "-")
                own.mkdir()
                print(json.dumps(measure(what, seed, base, own)), flush=True)


if __name__ == "__main__":
    main()

"""Zeroth order on a head alone: accuracy, and bytes of a site in a round.

    python benchmarks/tuning_head.py CACHE [--seeds 0,1,2] [--rounds 400] [--steps 1] [--probes 10]

Four sites of unequal size (`tuning_data`, "mixed") run `examples/zeroth_head.py` on the mean of
all-MiniLM-L6-v2's last states: 770 weights train, batches of 64. Nodes are processes on this
machine, over loopback. Prints a JSON line for each seed and keeps it in results/tuning_head.jsonl:
accuracy on 1,000 held-out sentences, bytes of scalars that a site sent in the whole run, and bytes
of a round at its socket, each way (TCP's payload: heartbeats, acknowledgments and names too).
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
import tuning_data
from node_process import Nodes, sets_of
from torch import nn

from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.observe.ledger_audit import LEDGER, read_ledger
from fsl_async.tools.versions import load_last

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "tuning_head.jsonl"
sys.path.insert(0, str(ROOT / "examples"))


def play(sites: tuple[Path, ...], folder: Path, settings: dict[str, object]) -> list[Any]:
    """Run to the end; returns the clients' results."""
    base = ("--base", tuning_data.minilm(), "--json")
    names = [f"site-{number}" for number in range(len(sites))]
    with Nodes(folder) as nodes:
        words = ("--role", "ps", "127.0.0.1:0", "--run-dir", "run", *base, *sets_of(settings))
        nodes.start("server", *words)
        address = nodes.address("server")
        for name, path in zip(names, sites, strict=True):
            nodes.start(
                name, "--role", "client", address, "--name", name, "--data", path, *base,
                "--task", f"{ROOT / 'examples' / 'zeroth_head.py'}:train",
                "--allow", "deltas,scalars,metrics", "--threads", 1,
            )  # fmt: skip
        for process in nodes.processes.values():
            process.wait()
        found = [json.loads(nodes.text(name).splitlines()[-1]) for name in names]
    if any("error" in one for one in found):
        raise SystemExit(str(found))
    return found


def accuracy_of(run_dir: Path, held_out: Path) -> float:
    """Share of held-out sentences that the newest version has right."""
    example = importlib.import_module("zeroth_head")
    features, labels = example.embedded(tuning_data.minilm(), held_out)
    head = nn.Linear(features.shape[1], 2)
    load_last(run_dir, ModelWeights(head))
    with torch.no_grad():
        return float((head(features).argmax(1) == labels).double().mean())


@click.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--seeds", default="0,1,2")
@click.option("--rounds", default=400)
@click.option("--steps", default=1, help="K: steps of a round.")
@click.option("--probes", default=10, help="P: directions of a step.")
@click.option("--rate", default=0.05)
def main(*, cache: Path, seeds: str, rounds: int, steps: int, probes: int, rate: float) -> None:
    """Run them and print the rows."""
    torch.set_num_threads(1)
    dealt = tuning_data.deal(cache / "mixed-0")
    for seed in map(int, seeds.split(",")):
        settings = {
            "tune.method": "zeroth",
            "tune.zo_steps": steps,
            "tune.zo_probes": probes,
            "tune.zo_mu": 0.01,
            "tune.zo_rate": rate,
            "train.batch": 64,
            "run.rounds": rounds,
            "run.seed": seed,
            "sync.clients": len(dealt.sites),
            "sync.min_clients": len(dealt.sites),
            "sync.quorum": 1.0,
        }
        with tempfile.TemporaryDirectory(prefix="tuning-head-") as made:
            run_dir = Path(made) / "run"
            results = play(dealt.sites, Path(made), settings)
            facts = read_ledger(run_dir / LEDGER)[0]
            row = {
                "bench": "tuning_head",
                "seed": seed,
                "rounds": rounds,
                "steps": steps,
                "probes": probes,
                "accuracy": accuracy_of(run_dir, dealt.held_out),
                "scalar_bytes_of_site": max(
                    one["traffic"]["payload"]["scalars up"] for one in results
                ),
                "deltas": sum(fact["fact"] == "accepted" for fact in facts),
                **{
                    f"socket_bytes_of_round_{way}": round(
                        fmean(one["traffic"]["sockets"][way] for one in results) / rounds, 1
                    )
                    for way in ("up", "down")
                },
            }
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Processor time of a split run in processes of its own, beside the same method in plain torch.

    python benchmarks/split_cost.py --data PATH > benchmarks/results/split_cost.jsonl
        (about ten minutes on two cores)

Ours is `fsl-node --role server --with-ps` and a process for each of three clients, over real
sockets, in mode lockstep: it computes what the plain loop computes (`lockstep.Plain`), in one
process, on the same batches. Both are run alternately, for one round and for 1 + ROUNDS rounds.
Seconds are user and system time of all processes.

    cpu_s       of the longer run
    start_s     of the shorter run without its round: interpreters, imports, keys, the end
    round_s     one round: the difference of both runs over ROUNDS
    ratio       our round_s over the plain loop's
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lockstep import Plain
from node_process import Nodes, sets_of

from fsl_async.config.load import load
from fsl_async.learn.data.facts import described, facts_of
from fsl_async.learn.split import build
from fsl_async.learn.split.task import open_samples

SITES = ("site-a", "site-b", "site-c")
ROUNDS = 6


def settings(method: str, rounds: int, data: str) -> list[str]:
    """Settings of both sides."""
    return [
        f"split.method={method}",
        "split.mode=lockstep",
        "split.up=fp32",
        "split.down=fp32",
        "split.samples=1024",
        "split.upload_every=5",
        "split.align_every=2",
        "split.align_passes=10",
        "split.cut=pool2",
        "model.family=small-cnn",
        "train.batch=32",
        "train.learning_rate=0.001",
        "train.threads=1",
        "train.device=cpu",
        f"sync.clients={len(SITES)}",
        f"sync.min_clients={len(SITES)}",
        f"run.rounds={rounds}",
        f"data.path={data}",
    ]


def plain(method: str, rounds: int, data: str) -> None:
    """Train in this process."""
    torch.set_num_threads(1)
    config = described(load(None, settings(method, rounds, data)))
    parts, facts = build.build_parts(config, at_client=False), facts_of(config)
    model = parts.model
    loop = Plain(method, config, model.client, model.server, parts.auxiliary, torch.float64, SITES)
    own = {site: open_samples(config, facts, (n, len(SITES))) for n, site in enumerate(SITES)}
    for number in range(rounds):
        loop.round(number, {site: list(own[site].round(number)) for site in SITES})


def ours(method: str, rounds: int, data: str, folder: Path) -> None:
    """Run the nodes to their end."""
    ends = {"listen.address": "tcp://127.0.0.1:0", "split.listen": "tcp://127.0.0.1:0"}
    sets = [word for one in settings(method, rounds, data) for word in ("--set", one)]
    with Nodes(folder) as nodes:
        words = ("--role", "server", "--with-ps", "--run-dir", "run", "--insecure")
        nodes.start("server", *words, *sets, *sets_of(ends))
        address = nodes.line("server", "--role client").split()[-1]
        for site in SITES:
            joins = ("--role", "client", "--name", site, "--data", data, "--insecure")
            nodes.start(site, *joins, "--allow", "deltas,activations,labels", address)
            time.sleep(0.2)
        for process in nodes.processes.values():
            if process.wait(600):
                raise RuntimeError(nodes.ended())


def cpu_s(who: str, method: str, rounds: int, data: str) -> float:
    """User and system time of the processes of one run, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if who == "plain":
        words = [__file__, "--plain", method, "--rounds", str(rounds), "--data", data]
        subprocess.run([sys.executable, *words], check=True)
    else:
        with tempfile.TemporaryDirectory(prefix="split-cost-") as name:
            ours(method, rounds, data, Path(name))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def row(method: str, data: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Both sides, alternately; medians."""
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for who, runs in found.items():
            runs.append((cpu_s(who, method, 1, data), cpu_s(who, method, 1 + rounds, data)))
    made: dict[str, Any] = {"bench": "split_cost", "method": method, "clients": len(SITES)}
    made |= {"rounds": 1 + rounds, "repeats": repeats}
    for who, runs in found.items():
        each = [(longer - one) / rounds for one, longer in runs]
        starts = [one - cost for (one, _), cost in zip(runs, each, strict=True)]
        made[who] = {
            "cpu_s": round(statistics.median(longer for _, longer in runs), 2),
            "start_s": round(statistics.median(starts), 2),
            "round_s": round(statistics.median(each), 3),
        }
    made["ratio"] = round(made["ours"]["round_s"] / made["plain"]["round_s"], 2)
    made["ratio_with_start"] = round(made["ours"]["cpu_s"] / made["plain"]["cpu_s"], 2)
    return made


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="color images of 32x32, such as CIFAR-10")
    parser.add_argument("--methods", default="fsl-sage,splitfed-v1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", help="train with this method in this process, and print nothing")
    options = parser.parse_args()
    if options.plain:
        plain(options.plain, options.rounds, options.data)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    for method in options.methods.split(","):
        print(json.dumps(row(method, options.data, options.rounds, options.repeats)), flush=True)


if __name__ == "__main__":
    main()

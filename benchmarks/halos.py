"""Time to a loss at four sites of unequal speed and bandwidth: rounds that wait, groups, async.

    sudo .venv/bin/python benchmarks/halos.py [--seconds 600] [--seeds 0,1,2] [waits groups ...]

The sites, and how they are linked, are those of HALoS (Kim et al., ICML 2025; utnslab/halos,
examples/env.yaml): bandwidths of 0.117 to 0.935 Gbit/s between four regions, and speeds of their
workers, of which each site has the first two here. They are network namespaces with links of these
rates (`netlab`), divided by 612, as our model of 0.115 M parameters is smaller than
theirs of 70.4 M: fp32 weights take as long on each link as theirs would. A step of a worker of
speed 1 takes 0.1 s, most of which it sleeps, so that two cores are enough for eight.

    waits     one parameter server, at the first site; rounds of 20 steps, and all wait for the last
    clock     the same server with the default trigger: a version every 4 s, and no client waits
    buffer    the same server; clients send by themselves, slow ones after fewer steps (DyLU), and
              every four deltas make a version
    groups    a parameter server at each site, a version every 4 s; global rounds every 60 s

Prints a JSON row for each: the time after which a client at the first site had weights with the
loss that `waits` reached at its end, in seconds and as a share of its time. Rows go to
results/halos.jsonl. Learning rates are constant, so that a curve does not depend on where it ends.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import node_process
import torch
from netlab.laboratory import Laboratory
from node_process import Nodes

from fsl_async.config.load import load, to_wire
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.models.gpt import GPT, gpt_config
from fsl_async.observe.ledger_audit import audit_run

RESULTS = Path(__file__).parent / "results" / "halos.jsonl"
SITES = ("a", "b", "c", "d")
GBIT_S = {
    ("a", "b"): 0.537, ("a", "c"): 0.935, ("a", "d"): 0.202,
    ("b", "c"): 0.386, ("b", "d"): 0.117, ("c", "d"): 0.127,
}  # fmt: skip
SPEEDS = {"a": (0.232, 0.907), "b": (0.574, 0.531), "c": (0.852, 0.132), "d": (0.827, 0.515)}
SMALLER = 612
"""70.4 M parameters over 0.115 M."""
STEP_S = 0.1
STEPS = 20
"""Of a round of `waits`, and of a delta of `buffer` at speed 1."""
EVERY_S, GLOBAL_S = 4.0, 60.0
PORT = 7100
WATCHED = "a-2"
"""The client whose weights are measured."""
MODEL = {"model.layers": 2, "model.width": 64, "model.heads": 4, "model.context": 64}
WAYS = ("waits", "clock", "buffer", "groups")
BYTES = 1 << 16
"""Of held-out text for a point of a curve."""


def sets_of(way: str, seed: int, lab: Laboratory) -> dict[str, Any]:
    """Settings of the parameter servers."""
    sets: dict[str, Any] = {
        "run.seed": seed,
        "sync.every_s": EVERY_S,
        "sync.clients": 8,
        "sync.min_clients": 8,
        "sync.round_cap_s": 60.0,
        "train.task": "own",
        "train.batch": 4,
        "train.schedule": "constant",
        "data.shards": 8,
        "data.source": "built-in",
        **MODEL,
    }
    match way:
        case "waits":
            sets |= {"sync.trigger": "rounds", "sync.quorum": 1.0}
        case "buffer":
            sets |= {
                "sync.trigger": "buffer",
                "sync.buffer": 4,
                "sync.local_steps": STEPS,
                "sync.pace": "speed",
            }
        case "groups":
            roster = ", ".join(f"{one}=tcp://{lab.address(one)}:{PORT}" for one in SITES)
            sets |= {
                "sync.clients": 2,
                "sync.min_clients": 2,
                "data.shards": 2,
                "groups.roster": roster,
                "groups.every": round(GLOBAL_S / EVERY_S),
                "groups.insecure": True,
            }
    return sets


def curve_of(folder: Path, begun: float) -> list[tuple[float, float]]:
    """Seconds and held-out loss of the versions that the watched client had."""
    tables = to_wire(load(None, [f"{key}={value}" for key, value in MODEL.items()]))
    model = GPT(gpt_config(tables))
    corpus = pretrain.open_corpus(tables, MODEL["model.context"])
    found = []
    for path in sorted(folder.glob("*.pt"), key=lambda one: float(one.stem)):
        model.load_state_dict(torch.load(path, weights_only=True))
        loss = pretrain.evaluate(model, corpus, limit_bytes=BYTES)
        found.append((round(float(path.stem) - begun, 1), round(loss, 4)))
    return found


class Play:
    """One run."""

    def __init__(self, way: str, seed: int, folder: Path, lab: Laboratory) -> None:
        self.way, self.folder = way, folder
        self.sets = sets_of(way, seed, lab)
        self.servers = SITES if way == "groups" else SITES[:1]
        self.at = {site: f"tcp://{lab.address(site)}:{PORT}" for site in SITES}
        self.nodes = Nodes(folder, lab)

    def play(self, seconds: float) -> list[tuple[float, float]]:
        """Run for so long after the first version; returns the watched client's curve."""
        kept = self.folder / "kept"
        kept.mkdir()
        with self.nodes:
            for site in self.servers:
                words = ("--name", site, "--run-dir", site, *node_process.sets_of(self.sets))
                self.nodes.start(site, "--role", "ps", self.at[site], *words)
            for site in SITES:
                server = site if self.way == "groups" else SITES[0]
                for number, speed in enumerate(SPEEDS[site], 1):
                    name = f"{site}-{number}"
                    self.nodes.start(
                        name, "--role", "client", self.at[server], "--name", name,
                        "--task", f"{Path(__file__).resolve()}:train", "--allow", "deltas,metrics",
                        site=site, HALOS_WAY=self.way, HALOS_STEP_S=STEP_S / speed,
                        HALOS_KEEP=kept if name == WATCHED else "",
                    )  # fmt: skip
            begun, deadline = math.inf, time.monotonic() + 180.0
            while time.time() < begun + seconds:
                if self.nodes.ended() or (begun == math.inf and time.monotonic() > deadline):
                    raise SystemExit(f"{self.way} does not go on: {self.nodes.ended()}")
                if begun == math.inf:
                    begun = min((float(one.stem) for one in kept.glob("*.pt")), default=math.inf)
                time.sleep(0.1)
            self.nodes.interrupt(*self.servers)
        return curve_of(kept, begun)

    def complaints(self) -> list[str]:
        """What the ledgers say."""
        return [text for one in self.servers for text in audit_run(self.folder / one).complaints()]


def row_of(way: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run one way."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halos-")))
        lab = stack.enter_context(Laboratory(SITES, pairs=tuple(GBIT_S)))
        for (one, other), gbit_s in GBIT_S.items():
            lab.set(f"{one}:{other}", f"rate={1000 * gbit_s / SMALLER:.3f}mbit", "queue=500ms")
        play = Play(way, seed, folder, lab)
        curve = play.play(seconds)
        complaints = play.complaints()
        merged = sum(audit_run(folder / one).merged for one in play.servers)
    return {
        "bench": "halos",
        "way": way,
        "seed": seed,
        "seconds": seconds,
        "curve": curve,
        "loss": curve[-1][1],
        "deltas_merged": merged,
        "complaints": complaints,
        "load": round(os.getloadavg()[0], 1),
    }


def time_to(curve: list[tuple[float, float]], loss: float) -> float:
    """The first time with this loss or less; infinite: never."""
    return next((at for at, one in curve if one <= loss), math.inf)


# --- the task of a client ---


def train(fed: Fed) -> None:
    """The built-in GPT, slowed down to a worker's speed."""
    step_s, keep = float(os.environ["HALOS_STEP_S"]), os.environ["HALOS_KEEP"]
    batch = int(fed.config["train"]["batch"])
    corpus = pretrain.open_corpus(fed.config, MODEL["model.context"])
    model = GPT(gpt_config(fed.config), seed=fed.seed)
    fed.attach(model)
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)
    batches = iter(fed.shard(corpus, batch=batch))
    kept = due = -1.0

    def keep_version() -> None:
        nonlocal kept
        version = fed.status()["version"]
        if keep and version > kept:
            kept = version
            with fed.at_version():
                state = {name: value.clone() for name, value in model.state_dict().items()}
            made = Path(keep, f"{time.time():.2f}.part")
            torch.save(state, made)
            made.rename(made.with_suffix(".pt"))

    def step() -> tuple[int, float] | None:
        nonlocal due
        window = next(batches, None)
        if window is None:
            return None
        loss = model.loss(window)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        due = max(due, time.monotonic() - step_s) + step_s
        time.sleep(max(0.0, due - time.monotonic()))
        return window.numel() - len(window), loss.item()

    keep_version()
    if os.environ["HALOS_WAY"] == "waits":
        for _ in fed.rounds():
            done = [one for _ in range(STEPS) if (one := step()) is not None]
            if not done or not fed.end_round(samples=sum(tokens for tokens, _ in done)):
                break
            keep_version()
        return
    while (made := step()) is not None:
        if not fed.step(tokens=made[0], metrics={"loss": made[1]}):
            break
        keep_version()


@click.command()
@click.option("--seconds", default=600.0)
@click.option("--seeds", default="0")
@click.argument("ways", nargs=-1, type=click.Choice(WAYS))
def main(*, seconds: float, seeds: str, ways: tuple[str, ...]) -> None:
    """Measure, and print the rows."""
    torch.set_num_threads(1)
    for seed in map(int, seeds.split(",")):
        target = None
        for way in ways or WAYS:
            row = row_of(way, seed, seconds)
            if way == "waits":
                target = row["loss"], row["curve"][-1][0]
            if target is not None:
                reached_s = time_to(row["curve"], target[0])
                row |= {"target": target[0], "reached_s": reached_s}
                row["share"] = round(reached_s / target[1], 3)
            print(json.dumps(row), flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

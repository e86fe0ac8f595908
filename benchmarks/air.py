"""Measures tuning over a simulated radio channel beside digital sending, at equal channel uses.

    python benchmarks/air.py CACHE                    all rows, two seeds
    python benchmarks/air.py CACHE --only "analog/*"  rows by channel/dB
    python benchmarks/air.py --table ROWS.jsonl       print the table

The code of a real run in virtual time (`fsl_async.simulate`): 20 sites tune LoRA factors of rank 4
of a random frozen tanh layer, and a head, 3,842 values, on mean-pooled all-MiniLM-L6-v2 vectors of
160 movie reviews each, 10 to 90 % of them positive; 20 rounds of 10 steps of AdamW on batches of
16. Accuracy is of 800 other reviews; its standard error is 1.6 points. All rows but "none" use the
channel 3,842 times a round; "none" has 20 times as many, without errors.

    analog              outer.channel = air with its defaults
    analog, error x     with errors of the sites' estimates of their paths
    digital, shares     each site a share of the values, 2.2 bits each, all together at the capacity
                        of a channel without fading (`fsl_async.tools.demo.air_task`)
    digital, one by one one site a round, all of the values that fit
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import poison
import torch
from numpy.typing import NDArray
from poison import BATCH, RATE, STEPS, TEST, flat, vectors
from torch import Tensor, nn

import fsl_async
from fsl_async.learn.data.counter import permutation
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger
from fsl_async.tools.demo import air_task
from fsl_async.tools.kept_run import KeptRun

SITES, ROUNDS, RANK, SNRS_DB, SEEDS = 20, 20, 4, (0, 10, 20), (0, 1)
CHANNELS: dict[str, dict[str, Any]] = {
    "none": {"outer.channel": "none"},
    "analog": {"outer.channel": "air"},
    "analog, error 10 %": {"outer.channel": "air", "air.estimate_error": 0.1},
    "analog, error 30 %": {"outer.channel": "air", "air.estimate_error": 0.3},
    "digital, shares": {"outer.channel": f"{air_task.__file__}:Digital"},
    "digital, one by one": {"outer.channel": f"{__file__}:OneByOne"},
}


class OneByOne(air_task.Digital):
    """One site a round sends all of its values that fit; turns are by chance."""

    def begin(self, seed: int, version: int, sites: Sequence[str]) -> NDArray[np.bool_]:
        """See `Channel.begin`."""
        sends = super().begin(seed, version, sites)
        turn, at = divmod(version, max(1, len(sites)))
        order = permutation(seed, f"digital/turns/{turn}", len(sites))
        sends &= np.arange(len(sites)) == order[at]
        return sends


class Model(poison.Model):
    """A random frozen layer with LoRA factors of RANK, and a head."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__(width, seed)
        self.lora_A = nn.Parameter(self.lora_A.detach()[:RANK].clone())
        self.lora_B = nn.Parameter(torch.zeros(width, RANK))


@cache
def reviews(folder: Path) -> tuple[Tensor, Tensor, list[NDArray[np.int64]]]:
    """Vectors and labels of all reviews, the first of them for the test; numbers of each site's."""
    found = vectors(folder)
    plain, labels = found["plain"], found["labels"]
    rest = np.arange(TEST, len(labels))
    pools = [list(rest[labels[rest] == label]) for label in (0, 1)]
    each, sites = len(rest) // SITES, []
    for site in range(SITES):
        positive = round(each * (0.1 + 0.8 * site / (SITES - 1)))
        counts = each - positive, positive
        sites.append(np.array([pools[label].pop() for label in (0, 1) for _ in
                               range(min(counts[label], len(pools[label])))]))  # fmt: skip
    scale = np.sqrt((plain**2).mean())
    return torch.from_numpy(plain / scale), torch.from_numpy(labels).long(), sites


def train(fed: Any, folder: Path) -> None:
    """A site's part of the run."""
    plain, labels, sites = reviews(folder)
    site, seed = fed.part[0], fed.settings.run.seed
    model = Model(plain.shape[1], seed)
    fed.attach(model)
    for number in fed.rounds():
        rng = np.random.default_rng((seed, site, number))
        optimizer, loss = torch.optim.AdamW(model.parameters(), RATE), torch.zeros(())
        for _ in range(STEPS):
            drawn = rng.choice(sites[site], BATCH)
            loss = nn.functional.cross_entropy(model(plain[drawn]), labels[drawn])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if not fed.end_round(samples=STEPS * BATCH, metrics={"loss": loss.item()}):
            break


def measure(channel: str, snr_db: int, seed: int, folder: Path) -> dict[str, Any]:
    """Play a run."""
    begun, (plain, labels, _) = time.monotonic(), reviews(folder)
    settings = {
        "run.rounds": ROUNDS,
        "sync.trigger": "rounds",
        "sync.min_clients": SITES,
        "sync.weighting": "uniform",
        "outer.optimizer": "average",
        "train.task": "own",
        "train.threads": 1,
        "air.snr_db": snr_db,
        **CHANNELS[channel],
    }
    with tempfile.TemporaryDirectory(prefix="air-") as place:
        run_dir, quiet = Path(place, "run"), lambda _: None
        fsl_async.simulate(
            partial(train, folder=folder), clients=SITES, settings=settings, seed=seed,
            step_seconds=0.1, run_dir=run_dir, log=quiet,
        )  # fmt: skip
        run, audit = KeptRun(run_dir), audit_run(run_dir)
        last = run.load(run.versions()[-1])
        sums = [one for one in read_ledger(run_dir / LEDGER)[0] if one["fact"] == "received"]
    assert last is not None
    assert audit.is_clean
    model = Model(plain.shape[1], seed)
    assert len(flat(model)) == len(last.vector)
    for name, part in sorted((one.name, one) for one in run.manifest.tensors):
        stop = part.offset + int(np.prod(part.shape))
        values = torch.from_numpy(last.vector[part.offset : stop].copy()).reshape(part.shape)
        with torch.no_grad():
            model.get_parameter(name).copy_(values)
    with torch.inference_mode():
        right = (model(plain[:TEST]).argmax(1) == labels[:TEST]).double().mean().item()
    return {
        "bench": "air",
        "channel": channel,
        "snr_db": snr_db,
        "seed": seed,
        "accuracy": round(right, 3),
        "uses": audit.channel_uses,
        "senders": round(sum(len(one["senders"]) for one in sums) / ROUNDS, 2),
        "power": round(max((one["power"] for one in sums), default=0.0), 3),
        "seconds": round(time.monotonic() - begun, 1),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Means over the seeds."""
    made = ["| | " + " | ".join(f"{snr} dB" for snr in SNRS_DB) + " |"]
    made += ["| --- |" + " ---: |" * len(SNRS_DB)]
    for channel in CHANNELS:
        cells = []
        for snr_db in SNRS_DB:
            found = [one["accuracy"] for one in rows if one["channel"] == channel and
                     (channel == "none" or one["snr_db"] == snr_db)]  # fmt: skip
            cells.append(f"{np.mean(found):.3f}")
        made.append(f"| {channel} | " + " | ".join(cells) + " |")
    return made


@click.command()
@click.argument("folder", metavar="[CACHE]", type=click.Path(path_type=Path), required=False)
@click.option("--only", default="*", help="Rows whose channel/dB is like this.")
@click.option("--table", "path", type=click.Path(path_type=Path), help="Print the table of rows.")
def main(folder: Path | None, only: str, path: Path | None) -> None:
    """Print a JSON line for each row."""
    if path is not None:
        print("\n".join(table([json.loads(line) for line in path.read_text().splitlines()])))
        return
    if folder is None:
        raise click.UsageError("name a folder that keeps the vectors")
    torch.set_num_threads(1)
    for seed, channel, snr_db in product(SEEDS, CHANNELS, SNRS_DB):
        is_wanted = fnmatch(f"{channel}/{snr_db}", only)
        if is_wanted and (channel != "none" or snr_db == SNRS_DB[0]):
            print(json.dumps(measure(channel, snr_db, seed, folder)), flush=True)


if __name__ == "__main__":
    main()

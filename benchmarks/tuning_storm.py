"""Fine-tuning in a storm of faults: what it loses, and how accurate it still gets.

    python benchmarks/tuning_storm.py CACHE [--seeds 0,1,2] [--faults-per-hour 125] [--rounds 24]

Four sites of unequal size and labels (`tuning.py`, "deep-mixed") tune all blocks of MiniLM at ranks
2, 4, 8 and 16, rule bank. Parameter server and sites are processes, each site behind a proxy that
can be cut, and launched again when it dies. `fsl-node chaos` kills and stops sites, cuts and slows
their links, from the first version on to the end of the run. Prints a JSON line for each seed, and
keeps it in results/tuning_storm.jsonl: the ledger's audit, alarms (a digest that differs is one),
and accuracy on the 1,000 held-out sentences. Calm runs are the rows of `tuning.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import torch
from storm import Play
from tuning import Bench, Size, Spec

from fsl_async.commands.status_report import NodeStatus
from fsl_async.config.settings import Config
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.tools.compare.alone import TunedModel
from fsl_async.tools.compare.tune import TuningChoices

RESULTS = Path(__file__).parent / "results" / "tuning_storm.jsonl"
METHOD = "bank"
RUN_S = 3600.0
KEPT = (
    "faults", "faults_by_kind", "participation", "back_after_kill", "never_back", "relaunches",
    "storm_s",
)  # fmt: skip


class TuningPlay(Play):
    """A run of `choices` in a storm, to its last version."""

    def __init__(self, choices: TuningChoices, folder: Path, faults_per_hour: float) -> None:
        super().__init__(folder, choices.names, faults_per_hour)
        self.choices, self.config = choices, choices.run(METHOD).config

    def server_words(self) -> Iterator[object]:
        """Options of the parameter server: the settings that are not defaults."""
        tables, usual = attrs.asdict(self.config), attrs.asdict(Config())
        tables["sync"] |= {"min_clients": 1, "quorum": 0.5}
        tables["session"] |= {"heartbeat_every_s": 1.0, "expire_after_s": 8.0}
        for table, values in tables.items():
            for key, value in values.items():
                if value != usual[table][key]:
                    yield from ("--set", f"{table}.{key}={json.dumps(value)}")
        yield from ("--base", self.choices.base)

    def client_words(self, name: str) -> Iterator[object]:
        """Options of a site."""
        number = self.names.index(name)
        yield from ("--base", self.choices.base, "--data", self.choices.data[number])
        yield from ("--rank", self.choices.ranks[number], "--layers", self.choices.layers)
        yield from ("--allow", "deltas,metrics")

    def has_begun(self) -> bool:
        """Whether there is a version of deltas."""
        return len(self.versions()) > 1

    def has_ended(self) -> bool:
        """Whether the last version is there."""
        return any(fact["version"] >= self.choices.rounds for fact in self.versions())


def row_of(bench: Bench, seed: int, rounds: int, faults_per_hour: float) -> dict[str, Any]:
    """Play one storm."""
    choices = bench.choices(Spec("deep-mixed", METHOD, seed))
    with tempfile.TemporaryDirectory(prefix="tuning-storm-") as made:
        play = TuningPlay(choices, Path(made), faults_per_hour)
        report = asyncio.run(play.play(seed, RUN_S))
        audit = audit_run(play.run_dir)
        # Digests of sites that differ from the parameter server's, and damage on the disk.
        alarms = NodeStatus(play.run_dir).state.ps.alarms
        score = TunedModel(play.config, choices.base, "scores", bench.held)(play.run_dir)
    return {
        "bench": "tuning_storm",
        "seed": seed,
        "rounds": rounds,
        "asked_per_hour": faults_per_hour,
        **{name: report[name] for name in KEPT if name in report},
        "deltas_acknowledged": audit.acknowledged,
        "deltas_merged": audit.merged,
        "lost": len(audit.lost),
        "doubled": len(audit.doubled),
        "complaints": audit.complaints(),
        "alarms": alarms,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "load": os.getloadavg()[0],
    }


@click.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--seeds", default="0,1,2", help="Of the runs and their storms.")
@click.option("--faults-per-hour", default=125.0)
@click.option("--rounds", default=24)
def main(*, cache: Path, seeds: str, faults_per_hour: float, rounds: int) -> None:
    """Play the storms and print the rows."""
    torch.set_num_threads(1)
    bench = Bench(cache, "deep-mixed", Size(rounds=rounds))
    for seed in map(int, seeds.split(",")):
        row = row_of(bench, seed, rounds, faults_per_hour)
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

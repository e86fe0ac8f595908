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
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from storm import RULES, SERVER, START_S, node, until
from tuning import Bench, Size, Spec

from fsl_async.cluster.supervisor import Child, Supervisor
from fsl_async.commands.status_report import NodeStatus
from fsl_async.config import address as addresses
from fsl_async.config.load import to_dict
from fsl_async.config.settings import Config
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger
from fsl_async.tools.compare.alone import TunedModel
from fsl_async.tools.compare.tune import TuningChoices
from fsl_async.tools.proxy import Proxy

RESULTS = Path(__file__).parent / "results" / "tuning_storm.jsonl"
METHOD = "bank"
RUN_S = 3600.0
STEADY = {"session.heartbeat_every_s": 1.0, "session.expire_after_s": 8.0}


class Play:
    """One run in a storm."""

    def __init__(self, choices: TuningChoices, folder: Path, faults_per_hour: float) -> None:
        self.choices, self.run_dir, self.faults = choices, folder / "run", faults_per_hour
        self.address = ""
        # A fixed port: the parameter server gets the same one again after it dies.
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.place = f"127.0.0.1:{free.getsockname()[1]}"

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.choices.run(METHOD).config

    def server(self) -> Child:
        """The parameter server."""
        tables, usual = to_dict(self.config), to_dict(Config())
        tables["sync"]["min_clients"] = 1
        tables["sync"]["quorum"] = 0.5
        sets = [
            f"{table}.{key}={json.dumps(value)}"
            for table, values in tables.items()
            for key, value in values.items()
            if value != usual[table][key]
        ]
        sets += [f"{key}={value}" for key, value in STEADY.items()]
        words = [word for one in sets for word in ("--set", one)]
        words += ["--base", self.choices.base]
        return node(SERVER, "--role", "ps", self.place, "--run-dir", self.run_dir, "--json", *words)

    def client(self, number: int, address: str) -> Child:
        """A site that dials its link."""
        name = self.choices.names[number]
        return node(
            name, "--role", "client", "--name", name, "--base", self.choices.base,
            "--data", self.choices.data[number], "--rank", self.choices.ranks[number],
            "--layers", self.choices.layers, "--allow", "deltas,metrics",
            "--run-dir", self.run_dir / "clients" / name, address,
        )  # fmt: skip

    def line(self, name: str, line: str) -> None:
        """Wait for the server's address."""
        if name == SERVER and not self.address and '"listening"' in line:
            self.address = json.loads(line)["address"]

    def version(self) -> int:
        """The newest version in the ledger."""
        path = self.run_dir / LEDGER
        facts = read_ledger(path)[0] if path.exists() else []
        return max((fact["version"] for fact in facts if fact["fact"] == "version"), default=-1)

    async def play(self, seed: int) -> dict[str, Any]:
        """Run from start to end; returns the report of the chaos command, and more."""
        async with Supervisor(
            log_path=self.run_dir.parent / "children.log", on_line=self.line, rules=RULES
        ) as supervisor:
            supervisor.start(self.server())
            await until(lambda: self.address, START_S, "the address")
            place = addresses.parse(self.address)
            links = []
            for number, name in enumerate(self.choices.names):
                follow = self.run_dir / "links" / name
                links.append(Proxy((place.host, place.port), follow=follow))
                supervisor.start(self.client(number, links[-1].address))
            await until(lambda: self.version() >= 1, START_S, "version 1")
            begun = time.monotonic()
            chaos = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "fsl_async.cli", "chaos", str(self.run_dir),
                "--faults-per-hour", str(self.faults), "--for", f"{RUN_S}s", "--seed", str(seed),
                "--kill", "--stop", "--partition", "--slow", "--json",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            rounds = self.choices.rounds
            await until(lambda: self.version() >= rounds, RUN_S, "the last version")
            seconds = time.monotonic() - begun
            chaos.send_signal(signal.SIGINT)
            out, _ = await chaos.communicate()
            names = self.choices.names
            launches = sum(supervisor.launches(name) for name in names) - len(names)
            await supervisor.stop_child(SERVER, 60.0, signal.SIGINT)
            for link in links:
                link.close()
        report = json.loads(out.splitlines()[-1]) if out.strip() else {}
        kept = ("faults", "faults_by_kind", "participation", "back_after_kill", "never_back")
        return {
            **{name: report[name] for name in kept if name in report},
            "relaunches": launches,
            "seconds": round(seconds, 1),
        }


def _alarms(run_dir: Path) -> int:
    """Digests of sites that differ from the parameter server's, and damage on the disk."""
    return NodeStatus(run_dir).state.ps.alarms


def row_of(bench: Bench, seed: int, rounds: int, faults_per_hour: float) -> dict[str, Any]:
    """Play one storm."""
    choices = bench.choices(Spec("deep-mixed", METHOD, seed))
    with tempfile.TemporaryDirectory(prefix="tuning-storm-") as made:
        play = Play(choices, Path(made), faults_per_hour)
        report = asyncio.run(play.play(seed))
        audit = audit_run(play.run_dir)
        alarms = _alarms(play.run_dir)
        score = TunedModel(play.config, choices.base, "scores", bench.held)(play.run_dir)
    return {
        "bench": "tuning_storm",
        "seed": seed,
        "rounds": rounds,
        "asked_per_hour": faults_per_hour,
        **report,
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

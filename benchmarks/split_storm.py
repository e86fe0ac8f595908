"""Kills processes of a real split run at moments drawn by a seed, and audits the result.

    python benchmarks/split_storm.py --method splitfed-v1 --kills 20 --seed 1
    python benchmarks/split_storm.py --method fsl-sage --mode lockstep --kills 8 --clients 2 \
        --folder DIR      keeps the files

Clients, the split server and the parameter server are processes. Each kill waits for its moment (at
most MOMENT_S seconds): right after a launch, before anything is uploaded; in the middle of an
alignment, of an average of replicas, of a commit; or at any time. One kill in five of a server is a
SIGTERM. The killed process is started again after at most two seconds, and at times another one
dies before it is up. At the end the run is ended in order, and the ledgers and the clients'
journals are compared: nothing merged or trained twice, nothing acknowledged lost, every process
ended well. Prints a JSON object; exit code 1 when anything is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import click

from fsl_async.observe.ledger_audit import audit_split_dir

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from split_parties import Parties
from warm import WarmStarter

MOMENT_S = 6.0
UP_S = 120.0
ROUNDS_S = 180.0
MOMENTS = {
    "align": ("server", "align"),
    "average": ("server", "average_replicas"),
    "checkpoint": ("server", "checkpoint"),
    "train": ("server", "train_upload"),
    "commit": ("ps", "commit"),
    "serve": ("ps", "send_version"),
}
"""For each moment: the process, and the effect in its journal that opens it."""


class Storm(Parties):
    """A run and its kills."""

    def __init__(
        self, folder: Path, method: str, mode: str, clients: int, seed: int, *, warm: bool
    ) -> None:
        names = [f"client-{number}" for number in range(clients)]
        chosen = {"split.method": method, "split.mode": mode, "split.align_passes": 4}
        super().__init__(folder, names, chosen)
        self.rng = random.Random(seed)
        self.running: dict[str, Any] = {}
        self.warm = WarmStarter() if warm else None
        self.kills: Counter[str] = Counter()
        self.servers = {"ps": self.ps_dir, "server": self.server_dir}
        self.log: TextIO = (folder / "storm.log").open("a")

    def launch(self, name: str) -> None:
        """Start one process."""
        if self.warm is not None:
            to = self.log.fileno()
            self.running[name] = self.warm.start_into(to, self.arguments(name), self.folder)
            return
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "fsl_async.cli", *self.arguments(name)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def kill(self, name: str, moment: str) -> None:
        """Kill one process at a moment, and check that it is gone."""
        self._await(moment)
        process = self.running[name]
        soft = name in self.servers and self.rng.random() < 0.2 and moment != "start"
        soft = soft and name == "server"  # SIGTERM at the parameter server ends the run
        process.send_signal(signal.SIGTERM if soft else signal.SIGKILL)
        code = process.wait(UP_S)
        if soft and code not in {64, -signal.SIGTERM}:  # the latter: it was still being started
            raise AssertionError(f"{name} ended with {code} when it was asked to")
        self.kills[
            f"{'client' if name in self.clients else name} at {moment}{' (TERM)' * soft}"
        ] += 1

    def _await(self, moment: str) -> None:
        if moment == "start":
            time.sleep(self.rng.uniform(0.0, 3.0))
        elif moment == "any":
            time.sleep(self.rng.uniform(0.0, MOMENT_S / 2))
        else:
            victim, kind = MOMENTS[moment]
            path = self.servers[victim] / "journal.jsonl"
            size, deadline = _size(path), time.monotonic() + MOMENT_S
            wanted = f'"{kind}"'.encode()
            while time.monotonic() < deadline and wanted not in _tail(path, size):
                time.sleep(0.005)

    def strike(self) -> None:
        """Kill a process, perhaps a second before the first is up again, and start both again."""
        victims = ["ps", "server", *self.clients]
        first = self.rng.choice(victims)
        self.kill(first, self.rng.choice([*MOMENTS, "any"]))
        down = [first]
        if self.rng.random() < 0.3:
            other = self.rng.choice([name for name in victims if name != first])
            self.kill(other, "any")
            down.append(other)
        time.sleep(self.rng.uniform(0.0, 2.0))
        for name in down:
            self.launch(name)
        if self.rng.random() < 0.3:  # it dies again before it has done anything
            self.kill(down[0], "start")
            self.launch(down[0])

    def go_on(self, rounds: int) -> None:
        """Wait until `rounds` more rounds are merged, the last one with every client.

        AssertionError: a process ended by itself, or the rounds did not come.
        """
        start, deadline = self.version(), time.monotonic() + ROUNDS_S
        while time.monotonic() < deadline:
            if self.version() >= start + rounds and self.all_clients_since(start):
                return
            for name, process in self.running.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended by itself with {process.returncode}")
            time.sleep(0.1)
        raise AssertionError(f"no {rounds} rounds with every client after version {start}")

    def finish(self) -> dict[str, int]:
        """End the run in order; return the exit codes."""
        self.running["ps"].send_signal(signal.SIGINT)
        return {name: process.wait(UP_S) for name, process in self.running.items()}

    def close(self) -> None:
        """End every process that is left."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.log.close()
        if self.warm is not None:
            self.warm.close()


def storm(
    folder: Path, *, method: str, mode: str, clients: int, kills: int, seed: int, warm: bool = False
) -> dict[str, Any]:
    """Run one storm; return its result."""
    begun = time.monotonic()
    run = Storm(folder, method, mode, clients, seed, warm=warm)
    problems: list[str] = []
    codes: dict[str, int] = {}
    try:
        for name in ("ps", "server", *run.clients):
            run.launch(name)
        run.kill(run.rng.choice(["server", *run.clients]), "start")  # before any upload
        for name, process in run.running.items():
            if process.poll() is not None:
                run.launch(name)
        run.go_on(1)
        while run.kills.total() < kills:
            run.strike()
            if run.rng.random() < 0.5:
                run.go_on(1)
        run.go_on(2)
        codes = run.finish()
        wanted = {name: 130 if name == "ps" else 0 for name in codes}
        if codes != wanted:
            problems.append(f"exit codes {codes}")
    except (AssertionError, subprocess.TimeoutExpired) as error:
        problems.append(str(error))
    finally:
        run.close()
    problems += run.problems()
    split = audit_split_dir(run.server_dir)
    return {
        "bench": "split_storm",
        "method": method,
        "mode": mode,
        "clients": clients,
        "seed": seed,
        "kills": dict(sorted(run.kills.items())),
        "versions": run.version(),
        "uploads": {"trained": split.trained, "declined": split.declined, "dropped": split.dropped},
        "came_back": split.came_back,
        "lives": dict(split.lives),
        "problems": problems,
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> bytes:
    if _size(path) <= start:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


@click.command()
@click.option("--method", default="fsl-sage")
@click.option("--mode", default="free", type=click.Choice(["free", "lockstep"]))
@click.option("--clients", default=3, type=click.IntRange(1, 16))
@click.option("--kills", default=12, type=click.IntRange(1, 1000))
@click.option("--seed", default=1)
@click.option("--warm", is_flag=True, help="Fork processes that have imported torch already.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the run here.")
def main(
    *, method: str, mode: str, clients: int, kills: int, seed: int, warm: bool, folder: Path | None
) -> None:
    """Run a storm and print its result."""
    with tempfile.TemporaryDirectory(prefix="split-storm-") as made:
        where = folder or Path(made)
        where.mkdir(parents=True, exist_ok=True)
        chosen: dict[str, Any] = {"method": method, "mode": mode, "clients": clients}
        found = storm(where, **chosen, kills=kills, seed=seed, warm=warm)
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()

"""A storm of kills over a real split run: clients, the split server and the parameter server, each a process, at moments drawn by a seed.

    python benchmarks/split_storm.py --method splitfed-v1 --kills 20 --seed 1
    python benchmarks/split_storm.py --method fsl-sage --mode lockstep --kills 8 --clients 2 --folder DIR      keep the files

Each kill waits for its moment (at most MOMENT_S seconds): right after a launch, before anything is uploaded; in the middle of an alignment, of an
average of replicas, of a commit; or at any time. One kill in five of a server is a SIGTERM. The killed process is started again after up to two
seconds, and at times another one dies before it is up. In the end the run is ended in order, and what the ledgers and the clients' journals say is compared: nothing merged or
trained twice, nothing acknowledged that was lost, every process at its good end. Prints a JSON object; exit code 1 when anything is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import click

from fsl_async.learn.sealed import unseal
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.observe.split_audit import audit_split_dir

MOMENT_S = 6.0
UP_S = 120.0
ROUNDS_S = 180.0
MOMENTS = {
    "align": ("server", "Align"),
    "average": ("server", "AverageReplicas"),
    "checkpoint": ("server", "Checkpoint"),
    "train": ("server", "TrainUpload"),
    "commit": ("ps", "Commit"),
    "serve": ("ps", "Serve"),
}
"""A moment -> in whose journal which effect opens it."""

SETTINGS: dict[str, Any] = {
    "split.samples": 8,
    "split.upload_every": 2,
    "split.align_every": 2,
    "split.align_passes": 4,
    "split.buffer_samples": 8,
    "split.checkpoint_every": 7,
    "session.heartbeat_every_s": 0.5,
    "session.expire_after_s": 4,
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 16,
    "train.batch": 2,
    "train.threads": 1,
    "train.device": "cpu",
}


class Storm:
    """A run and what is done to it."""

    def __init__(self, folder: Path, method: str, mode: str, clients: int, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.names = [f"client-{number}" for number in range(clients)]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: Counter[str] = Counter()
        self.ports = {"ps": _free_port(), "server": _free_port()}
        text = folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
        chosen = SETTINGS | {
            "split.method": method,
            "split.mode": mode,
            "split.listen": f"tcp://127.0.0.1:{self.ports['server']}",
            "sync.clients": clients,
            "sync.min_clients": clients,
            "data.shards": clients,
            "data.path": str(text),
        }
        self.sets = [
            part
            for key, value in chosen.items()
            for part in ("--set", f"{key}={json.dumps(value)}")
        ]
        self.folders = {"ps": folder / "ps", "server": folder / "split" / "server"}
        self.log: TextIO = (folder / "storm.log").open("a")

    def launch(self, name: str) -> None:
        """Start one process."""
        place = f"127.0.0.1:{self.ports['ps']}"
        if name == "ps":
            role = ["--role", "ps", "--run-dir", str(self.folders["ps"]), *self.sets, place]
        elif name == "server":
            role = ["--role", "server", "--run-dir", str(self.folder / "split"), *self.sets]
        else:
            role = ["--role", "client", "--name", name, "--run-dir", str(self.folder / name), place]
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "fsl_async.cli", *role],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def kill(self, name: str, moment: str) -> None:
        """Kill one process at a moment, and see that it is gone."""
        self._await(moment)
        process = self.running[name]
        soft = name in self.folders and self.chance.random() < 0.2 and moment != "start"
        soft = soft and name == "server"  # a parameter server that is asked to end ends the run
        process.send_signal(signal.SIGTERM if soft else signal.SIGKILL)
        code = process.wait(UP_S)
        if soft and code not in {64, -signal.SIGTERM}:  # the latter: it was still being started
            raise AssertionError(f"{name} ended with {code} when it was asked to")
        self.kills[f"{'client' if name in self.names else name} at {moment}{' (TERM)' * soft}"] += 1

    def _await(self, moment: str) -> None:
        if moment == "start":
            time.sleep(self.chance.uniform(0.0, 3.0))
        elif moment == "any":
            time.sleep(self.chance.uniform(0.0, MOMENT_S / 2))
        else:
            who, kind = MOMENTS[moment]
            path = self.folders[who] / "journal.jsonl"
            size, deadline = _size(path), time.monotonic() + MOMENT_S
            wanted = f'"{kind}"'.encode()
            while time.monotonic() < deadline and wanted not in _tail(path, size):
                time.sleep(0.005)

    def strike(self) -> None:
        """One blow: somebody dies, perhaps somebody else before the first is up again, and both come back."""
        victims = ["ps", "server", *self.names]
        first = self.chance.choice(victims)
        self.kill(first, self.chance.choice([*MOMENTS, "any"]))
        down = [first]
        if self.chance.random() < 0.3:
            other = self.chance.choice([name for name in victims if name != first])
            self.kill(other, "any")
            down.append(other)
        time.sleep(self.chance.uniform(0.0, 2.0))
        for name in down:
            self.launch(name)
        if self.chance.random() < 0.3:  # it dies again before it has done anything
            self.kill(down[0], "start")
            self.launch(down[0])

    def go_on(self, rounds: int) -> None:
        """Wait until so many more rounds are merged, with everybody in the last of them. Raises AssertionError."""
        start, deadline = self.version()[0], time.monotonic() + ROUNDS_S
        while time.monotonic() < deadline:
            version, merged = self.version()
            if version >= start + rounds and merged == set(self.names):
                return
            for name, process in self.running.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended by itself with {process.returncode}")
            time.sleep(0.1)
        raise AssertionError(f"no {rounds} rounds with everybody after version {start}")

    def version(self) -> tuple[int, set[str]]:
        """The newest version, and whose models it is made of."""
        path = self.folders["ps"] / "ledger.jsonl"
        newest: tuple[int, set[str]] = (-1, set())
        for line in _ledger(path):
            if line.get("fact") == "version":
                merged = {str(one["key"]).split("/")[0] for one in line["merged"]}
                newest = int(line["version"]), merged
        return newest

    def finish(self) -> dict[str, int]:
        """End the run in order; exit codes."""
        self.running["ps"].send_signal(signal.SIGINT)
        return {name: process.wait(UP_S) for name, process in self.running.items()}

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.log.close()

    def problems(self) -> list[str]:
        """What the ledgers and journals say that must not be."""
        audit = audit_run(self.folders["ps"])
        found = [f"lost {each}" for each in audit.lost]
        found += [f"doubled {each}" for each in audit.doubled]
        found += [*audit.problems, *audit_split_dir(self.folders["server"]).problems]
        lines = _ledger(self.folders["server"] / "ledger.jsonl")
        trained = {line["key"] for line in lines if line.get("outcome") == "trained"}
        for name in self.names:
            for line in _journal(self.folder / name / "journal.jsonl"):
                told = line.get("type") in {"UploadAcknowledged", "AnswerReceived"}
                if told and line["key"] not in trained:
                    found.append(f"{name} was told that {line['key']} is trained, and it never was")
        return found


def storm(
    folder: Path, *, method: str, mode: str, clients: int, kills: int, seed: int
) -> dict[str, Any]:
    """Run one; what came of it."""
    begun = time.monotonic()
    run = Storm(folder, method, mode, clients, seed)
    problems: list[str] = []
    codes: dict[str, int] = {}
    try:
        for name in ("ps", "server", *run.names):
            run.launch(name)
        run.kill(run.chance.choice(["server", *run.names]), "start")  # before any upload
        for name, process in run.running.items():
            if process.poll() is not None:
                run.launch(name)
        run.go_on(1)
        while run.kills.total() < kills:
            run.strike()
            if run.chance.random() < 0.5:
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
    split = audit_split_dir(run.folders["server"])
    return {
        "bench": "split_storm",
        "method": method,
        "mode": mode,
        "clients": clients,
        "seed": seed,
        "kills": dict(sorted(run.kills.items())),
        "versions": run.version()[0],
        "uploads": {"trained": split.trained, "declined": split.declined, "dropped": split.dropped},
        "came_back": split.came_back,
        "lives": dict(split.lives),
        "problems": problems,
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> bytes:
    if _size(path) <= start:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def _ledger(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes().splitlines() if path.exists() else []
    return [dict(line) for line in map(unseal, raw) if line]


def _journal(path: Path) -> list[dict[str, Any]]:
    found = []
    for raw in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a line that a kill has cut off
            found.append(json.loads(raw))
    return found


@click.command()
@click.option("--method", default="fsl-sage")
@click.option("--mode", default="free", type=click.Choice(["free", "lockstep"]))
@click.option("--clients", default=3, type=click.IntRange(1, 16))
@click.option("--kills", default=12, type=click.IntRange(1, 1000))
@click.option("--seed", default=1)
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the run here.")
def main(
    *, method: str, mode: str, clients: int, kills: int, seed: int, folder: Path | None
) -> None:
    """Run a storm and print what came of it."""
    with tempfile.TemporaryDirectory(prefix="split-storm-") as made:
        where = folder or Path(made)
        where.mkdir(parents=True, exist_ok=True)
        found = storm(where, method=method, mode=mode, clients=clients, kills=kills, seed=seed)
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()

"""What faults cost eight clients in tokens, in syncs, and in time.

    python benchmarks/storm.py [--seeds 1,2,3] [--faults-per-hour 125] [--calm 120] [--storm 300]
        [--every 15] [--clients 8] [--out FILE]

A storm is a seed, and some seeds are mild. So the seeds 1, 2 and 3 are fixed here, and the median
and the worst of them count: that is the last line.

One run for each seed, on this machine: a parameter server and clients as processes, each client
behind a proxy that can be cut, launched again by a supervisor when it dies. First it runs `--calm`
seconds without faults, then `fsl-node chaos` injects all four kinds for `--storm` seconds. Prints
each report as one JSON line, with the audit of the ledger.

A step takes its time without computing (0.1 s of sleep, as where a GPU computes), so that tokens do
not depend on other load, and the other clients do not use a dead client's cores to train its
tokens. Starting Python and importing torch do compute, on the same cores.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, Supervisor
from fsl_async.config import address as addresses
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger
from fsl_async.tools.proxy import Proxy

TASK = """
import time, torch

def train(fed):
    model = torch.nn.Linear(512, 512)
    fed.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        loss = model(torch.ones(1, 512)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        time.sleep(0.1)
        if not fed.step(tokens=1000, metrics={"loss": loss.item()}):
            break
"""
START_S = 240.0
SERVER = "server"
RULES = RestartRules(first_wait_s=0.2, longest_wait_s=2.0, budget=100)


def node(name: str, *words: object) -> Child:
    """A node as a child process."""
    argv = (sys.executable, "-P", "-m", "fsl_async.cli", *map(str, words))
    return Child(name, argv, env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})


async def until(ready: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something; ends the program when the time is over."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not happen within {seconds:g} s")
        await asyncio.sleep(0.1)


class Play:
    """One run."""

    def __init__(self, given: argparse.Namespace, seed: int, folder: Path) -> None:
        self.given = given
        self.seed = seed
        self.run_dir = folder / "run"
        self.task = folder / "task.py"
        self.task.write_text(TASK)
        self.names = [f"client-{number}" for number in range(1, given.clients + 1)]
        self.address = ""
        # A fixed port: the parameter server gets the same one again after it dies.
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.place = f"127.0.0.1:{free.getsockname()[1]}"

    def server(self) -> Child:
        """The parameter server."""
        settings = {
            "sync.every_s": self.given.every,
            "sync.clients": self.given.clients,
            "data.shards": self.given.clients,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 3.0,
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return node(SERVER, "--role", "ps", self.place, "--run-dir", self.run_dir, "--json", *sets)

    def client(self, name: str, address: str) -> Child:
        """A client that dials its link."""
        where = self.run_dir / "clients" / name
        task = f"{self.task}:train"
        return node(
            name, "--role", "client", "--name", name, "--run-dir", where, "--task", task, address
        )

    def line(self, name: str, line: str) -> None:
        """Wait for the server's address."""
        if name == SERVER and not self.address and '"listening"' in line:
            self.address = json.loads(line)["address"]

    def versions(self) -> list[dict[str, Any]]:
        """The ledger's versions so far."""
        path = self.run_dir / LEDGER
        facts, _ = read_ledger(path) if path.exists() else ([], [])
        return [fact for fact in facts if fact["fact"] == "version"]

    def all_joined(self) -> bool:
        """Whether a version has merged every client."""
        return any(len(fact["merged"]) >= self.given.clients for fact in self.versions())

    async def play(self) -> dict[str, Any]:
        """Run one storm from start to end; return the chaos command's report, and more."""
        given = self.given
        async with Supervisor(
            log_path=self.run_dir.parent / "children.log", on_line=self.line, rules=RULES
        ) as supervisor:
            supervisor.start(self.server())
            await until(lambda: self.address, START_S, "listening")
            place = addresses.parse(self.address)
            links = []
            for name in self.names:
                follow = self.run_dir / "links" / name
                links.append(Proxy((place.host, place.port), follow=follow))
                supervisor.start(self.client(name, links[-1].address))
            await until(self.all_joined, START_S, "a sync of all clients")
            begun = time.time()
            await asyncio.sleep(given.calm)
            calm = [fact for fact in self.versions() if fact["at"] >= begun]
            if len(calm) < 2:
                raise SystemExit("--calm is shorter than two syncs")
            seconds = calm[-1]["at"] - calm[0]["at"]
            before = (calm[-1]["tokens_total"] - calm[0]["tokens_total"]) / seconds
            chaos = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "fsl_async.cli", "chaos", str(self.run_dir),
                "--faults-per-hour", str(given.faults_per_hour), "--for", f"{given.storm}s",
                "--kill", "--stop", "--partition", "--slow", "--seed", str(self.seed), "--json",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await chaos.communicate()
            launches = sum(supervisor.launches(name) for name in self.names) - len(self.names)
            await supervisor.stop_child(SERVER, 60.0, signal.SIGINT)
            for link in links:
                link.close()
        return {
            **json.loads(out.splitlines()[-1]),
            "calm_tokens_per_s": round(before, 1),
            "relaunches": launches,
        }


def row_of(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Play one storm."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if given.keep is None else given.keep / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        row = asyncio.run(Play(given, seed, folder).play())
        audit = audit_run(folder / "run")
    return {
        "asked_per_hour": given.faults_per_hour,
        "every_s": given.every,
        "calm_s": given.calm,
        "seed": seed,
        **row,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "deltas_acknowledged": audit.acknowledged,
        "complaints": audit.complaints(),
    }


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst over the seeds of tokens, participation of a storm's syncs, and seconds
    until every client is back.

    A storm that is too short has no sync, or no client that came back: it is left out where it has
    no value.
    """
    return {
        "seeds": [row["seed"] for row in rows],
        "faults": [row["faults"] for row in rows],
        "throughput": _median_and(min, [row["throughput"] for row in rows]),
        "participation": _median_and(min, [row["participation"] for row in rows]),
        "back_s": _median_and(max, [row["back"]["median_s"] for row in rows]),
    }


def _median_and(
    worst: Callable[[list[float]], float], found: list[float | None]
) -> dict[str, float] | None:
    known = [value for value in found if value is not None]
    return {"median": statistics.median(known), "worst": worst(known)} if known else None


def main() -> int:
    """Play them and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--calm", type=float, default=120.0)
    parser.add_argument("--storm", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the runs here")
    given = parser.parse_args()
    rows = []
    for seed in map(int, given.seeds.split(",")):
        rows.append(row_of(given, seed))
        print(json.dumps(rows[-1]), flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(json.dumps(summed_up(rows)))
    return 1 if any(row["complaints"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Callable, Iterator, Sequence
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
    """One run: a parameter server and clients behind proxies, and the chaos command beside them."""

    def __init__(self, folder: Path, names: Sequence[str], faults_per_hour: float) -> None:
        self.run_dir, self.names, self.faults = folder / "run", names, faults_per_hour
        self.address = ""
        # A fixed port: the parameter server gets the same one again after it dies.
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.place = f"127.0.0.1:{free.getsockname()[1]}"

    def server_words(self) -> Iterator[object]:
        """Options of the parameter server."""
        raise NotImplementedError

    def client_words(self, name: str) -> Iterator[object]:
        """Options of a client."""
        raise NotImplementedError

    def versions(self) -> list[dict[str, Any]]:
        """The ledger's versions so far."""
        path = self.run_dir / LEDGER
        facts, _ = read_ledger(path) if path.exists() else ([], [])
        return [fact for fact in facts if fact["fact"] == "version"]

    def has_begun(self) -> bool:
        """Whether the run is ready for faults."""
        raise NotImplementedError

    async def calm(self) -> dict[str, Any]:
        """Wait without faults; return what was measured."""
        return {}

    def has_ended(self) -> bool:
        """Whether the storm may end before its time."""
        return False

    def _line(self, name: str, line: str) -> None:
        if name == SERVER and not self.address and '"listening"' in line:
            self.address = json.loads(line)["address"]

    async def play(self, seed: int, storm_s: float) -> dict[str, Any]:
        """Run one storm from start to end; return the chaos command's report, and more."""
        async with Supervisor(
            log_path=self.run_dir.parent / "children.log", on_line=self._line, rules=RULES
        ) as supervisor:
            listen = ("--role", "ps", self.place, "--run-dir", self.run_dir, "--json")
            supervisor.start(node(SERVER, *listen, *self.server_words()))
            await until(lambda: self.address, START_S, "listening")
            place = addresses.parse(self.address)
            links = []
            for name in self.names:
                links.append(Proxy((place.host, place.port), follow=self.run_dir / "links" / name))
                dial = ("--run-dir", self.run_dir / "clients" / name, links[-1].address)
                words = ("--role", "client", "--name", name, *self.client_words(name))
                supervisor.start(node(name, *words, *dial))
            await until(self.has_begun, START_S, "the first version of all clients")
            found = await self.calm()
            begun = time.monotonic()
            chaos = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "fsl_async.cli", "chaos", str(self.run_dir),
                "--faults-per-hour", str(self.faults), "--for", f"{storm_s}s",
                "--kill", "--stop", "--partition", "--slow", "--seed", str(seed), "--json",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            report = asyncio.create_task(chaos.communicate())
            await until(lambda: report.done() or self.has_ended(), storm_s + START_S, "the end")
            seconds = time.monotonic() - begun
            if not report.done():
                chaos.send_signal(signal.SIGINT)
            out, _ = await report
            launches = sum(supervisor.launches(name) for name in self.names) - len(self.names)
            await supervisor.stop_child(SERVER, 60.0, signal.SIGINT)
            for link in links:
                link.close()
        reported = json.loads(out.splitlines()[-1]) if out.strip() else {}
        return {**reported, **found, "relaunches": launches, "storm_s": round(seconds, 1)}


class SleepingPlay(Play):
    """Clients whose steps take their time without computing."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        names = [f"client-{number}" for number in range(1, given.clients + 1)]
        super().__init__(folder, names, given.faults_per_hour)
        self.given = given
        self.task = folder / "task.py"
        self.task.write_text(TASK)

    def server_words(self) -> Iterator[object]:
        """Options of the parameter server."""
        for key, value in {
            "sync.every_s": self.given.every,
            "sync.clients": self.given.clients,
            "data.shards": self.given.clients,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 3.0,
        }.items():
            yield from ("--set", f"{key}={value}")

    def client_words(self, name: str) -> Iterator[object]:
        """Options of a client."""
        yield from ("--task", f"{self.task}:train")

    def has_begun(self) -> bool:
        """Whether a version has merged every client."""
        return any(len(fact["merged"]) >= self.given.clients for fact in self.versions())

    async def calm(self) -> dict[str, Any]:
        """Return the tokens a second without faults."""
        begun = time.time()
        await asyncio.sleep(self.given.calm)
        calm = [fact for fact in self.versions() if fact["at"] >= begun]
        if len(calm) < 2:
            raise SystemExit("--calm is shorter than two syncs")
        tokens = calm[-1]["tokens_total"] - calm[0]["tokens_total"]
        return {"calm_tokens_per_s": round(tokens / (calm[-1]["at"] - calm[0]["at"]), 1)}


def row_of(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Play one storm."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if given.keep is None else given.keep / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        row = asyncio.run(SleepingPlay(given, folder).play(seed, given.storm))
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

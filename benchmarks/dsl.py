"""Two clients behind slow links, beside the same two without: syncs, false deaths, training lost.

    python benchmarks/dsl.py
        50 M parameters, `dsl`, ten syncs of 120 s; needs root, 25-40 minutes
    python benchmarks/dsl.py --profile wireless --syncs 3 --layers 2 --width 128 --every 20
    python benchmarks/dsl.py --read FOLDER
        the row of a run kept by --folder

Both runs, each a parameter server and two clients as processes, go at the same time on the same
cores, so that other work on the machine slows both equally. In one, each client and the parameter
server have their own link in the network laboratory; the other is on loopback. Deaths are clients
that the parameter server gave up; none of them had died.

Tokens are those that clients trained, by the snapshots in their journals, over the same seconds of
the same clock in both runs: from the moment when all four train to the last snapshot that all four
have made. The ledger shows that trained tokens are merged: "merged_share" is the share that
versions merged of the tokens in snapshots taken at least one sync before the end.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from attrs import define, field
from netlab.laboratory import Laboratory

from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import LEDGER, read_ledger

CLIENTS = ("a", "b")
POLL_S = 5.0


@define
class Arm:
    """One run. `lab`: None on loopback."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    lab: Laboratory | None
    processes: list[subprocess.Popen[bytes]] = field(factory=list)

    def start(self) -> None:
        """Start the parameter server, then its clients once it listens."""
        self.folder.mkdir(parents=True)
        host = "127.0.0.1" if self.lab is None else self.lab.address("server")
        sets = [
            part
            for key, value in self.settings.items()
            for part in ("--set", f"{key}={json.dumps(value)}")
        ]
        run_dir = str(self.folder / "ps")
        self._node(
            "server", ["--role", "ps", f"tcp://{host}:0", "--run-dir", run_dir, "--json", *sets]
        )
        address = self._address()
        for name in CLIENTS:
            folder = str(self.folder / name)
            self._node(
                name,
                [
                    "--role",
                    "client",
                    address,
                    "--name",
                    name,
                    "--run-dir",
                    folder,
                    "--allow",
                    "deltas,metrics",
                ],
            )

    def _node(self, site: str, arguments: Sequence[str]) -> None:
        words = [sys.executable, "-P", "-m", "fsl_async.cli", *arguments]
        if self.lab is not None:
            words = list(self.lab.command(site, [*words, "--insecure"]))
        log = (self.folder / f"{site}.log").open("wb")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=env)
        log.close()
        self.processes.append(process)

    def _address(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in (self.folder / "server.log").read_text().splitlines():
                if line.startswith("{") and "address" in (reported := json.loads(line)):
                    return str(reported["address"])
            time.sleep(0.2)
        raise SystemExit(
            f"{self.name}: the parameter server does not listen; see {self.folder}/server.log"
        )

    def facts(self, kind: str) -> list[dict[str, Any]]:
        """Facts of the parameter server's ledger."""
        path = self.folder / "ps" / LEDGER
        facts, _ = read_ledger(path) if path.exists() else ([], [])
        return [fact for fact in facts if fact["fact"] == kind]

    def deaths(self) -> list[str]:
        """Sessions that did not end in order, by the parameter server's journal."""
        journal = JournalReader(self.folder / "ps" / "journal.jsonl", having=(b'"client_left"',))
        ended = [line for line in journal.read_all() if line["type"] == "client_left"]
        return [json.dumps(line) for line in ended if line["reason"] != "bye"]

    def stop(self) -> None:
        """End the run, clients last; they receive the last version."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running(arm: Arm) -> Iterator[Arm]:
    """Start the run; end it in any case."""
    try:
        arm.start()
        yield arm
    finally:
        arm.stop()


def result_of(arm: Arm, deaths: Sequence[str]) -> dict[str, Any]:
    """The result by a run's ledger; version 0 is the initial model, so counting starts after it."""
    merged = [fact for fact in arm.facts("version") if fact["version"] >= 1]
    sizes = [fact["update_bytes"] for fact in merged]
    taking_part = [{one["key"].partition("/")[0] for one in fact["merged"]} for fact in merged]
    taken = {one["key"]: one["tokens"] for fact in merged for one in fact["merged"]}
    made = [one for name in CLIENTS for one in snapshots(arm, name)[:-2]]
    return {
        "syncs": len(merged),
        "deaths": len(deaths),
        "both_in": sum(len(names) == len(CLIENTS) for names in taking_part),
        "merged_share": round(
            sum(taken.get(one.key, 0) for one in made) / max(1, sum(one.tokens for one in made)), 4
        ),
        "every_s": round((merged[-1]["at"] - merged[0]["at"]) / max(1, len(merged) - 1), 1),
        "update_mb": round(sum(sizes) / len(sizes) / 1e6, 1),
    }


@define
class Snapshot:
    """What a client trained since the previous snapshot, at `at` on the machine's clock.

    `key` is its delta's.
    """

    key: str
    at: float
    tokens: int


def snapshots(arm: Arm, name: str) -> list[Snapshot]:
    """Snapshots of a client's journal, with the deltas that were offered."""
    kinds = ("snapshotted", "offer_delta")
    path = arm.folder / name / "journal.jsonl"
    journal = JournalReader(path, having=tuple(f'"{kind}"'.encode() for kind in kinds))
    found: list[Snapshot] = []
    at = 0.0
    for entry in journal.read_all():
        if entry["type"] == "snapshotted":
            at = entry["t"]
        elif entry["type"] == "offer_delta":
            delta = entry["delta"]
            found.append(Snapshot(delta["key"], at, delta["tokens"]))
    return found


def trained(found: Sequence[Snapshot], begin_at: float, end_at: float) -> float:
    """Tokens between two times: complete spans between snapshots, and parts of spans."""
    tokens = 0.0
    for before, after in itertools.pairwise(found):
        inside_s = min(end_at, after.at) - max(begin_at, before.at)
        tokens += after.tokens * max(0.0, inside_s) / (after.at - before.at)
    return tokens


def speeds(arms: Sequence[Arm]) -> tuple[dict[str, float], float]:
    """Tokens a second of each run over the seconds that all have in common, and the seconds."""
    found = {(arm.name, name): snapshots(arm, name) for arm in arms for name in CLIENTS}
    begin_at = max(one[0].at for one in found.values())
    end_at = min(one[-1].at for one in found.values())
    seconds = end_at - begin_at
    return {
        arm.name: sum(trained(found[arm.name, name], begin_at, end_at) for name in CLIENTS)
        / seconds
        for arm in arms
    }, seconds


@click.command()
@click.option("--profile", default="dsl", show_default=True)
@click.option("--syncs", default=10, show_default=True)
@click.option(
    "--every",
    "every_s",
    default=120.0,
    show_default=True,
    help="Seconds from one sync to the next.",
)
@click.option("--layers", default=16, show_default=True)
@click.option(
    "--width", default=512, show_default=True, help="16 layers of 512 are 50 M parameters."
)
@click.option("--format", "number_format", default="e4m3", show_default=True)
@click.option(
    "--limit",
    "limit_s",
    default=5400.0,
    show_default=True,
    help="Seconds until the run is given up.",
)
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the runs here.")
@click.option("--read", type=click.Path(exists=True, path_type=Path), help="Run nothing.")
def main(
    *,
    profile: str,
    syncs: int,
    every_s: float,
    layers: int,
    width: int,
    number_format: str,
    limit_s: float,
    folder: Path | None,
    read: Path | None,
) -> None:
    """Print a row."""
    head = {
        "bench": "dsl",
        "profile": profile,
        "layers": layers,
        "width": width,
        "format": number_format,
        "every_s": every_s,
    }
    if read is not None:
        arms = [Arm(name, read / name, {}, None) for name in ("line", "near")]
        deaths = json.loads((read / "deaths.json").read_text())
        print(json.dumps({**head, **row_of(arms, deaths)}))
        return
    settings = {
        "sync.every_s": every_s,
        "sync.clients": len(CLIENTS),
        "sync.min_clients": len(CLIENTS),
        "codec.up": number_format,
        "codec.down": number_format,
        "data.source": "built-in",
        "data.shards": len(CLIENTS),
        "model.layers": layers,
        "model.width": width,
        "model.heads": 8,
        "model.context": 64,
        "train.batch": 1,
        "train.threads": 1,
        "train.device": "cpu",
    }
    begun = time.monotonic()
    with ExitStack() as stack:
        home = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsl-dsl-")))
        lab = stack.enter_context(Laboratory(["server", *CLIENTS], profile=profile))
        line = stack.enter_context(running(Arm("line", home / "line", settings, lab)))
        near = stack.enter_context(running(Arm("near", home / "near", settings, None)))
        reported = (-1, -1)
        while time.monotonic() - begun < limit_s:
            done = tuple(len(arm.facts("version")) - 1 for arm in (line, near))
            if done != reported:
                print(
                    f"{time.monotonic() - begun:6.0f} s  syncs: line {done[0]}, near {done[1]}",
                    file=sys.stderr,
                )
                reported = (done[0], done[1])
            if min(done) >= syncs or any(
                p.poll() is not None for arm in (line, near) for p in arm.processes
            ):
                break
            time.sleep(POLL_S)
        deaths = {arm.name: arm.deaths() for arm in (line, near)}  # the end of the run is no death
        (home / "deaths.json").write_text(json.dumps(deaths))
        print(json.dumps({**head, **row_of([line, near], deaths)}))


def row_of(arms: Sequence[Arm], deaths: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Both runs beside each other."""
    rows = {arm.name: result_of(arm, deaths[arm.name]) for arm in arms}
    tokens_per_s, seconds = speeds(arms)
    return {
        **{f"{name}_{key}": value for name, row in rows.items() for key, value in row.items()},
        **{f"{name}_tokens_per_s": round(value, 2) for name, value in tokens_per_s.items()},
        "common_seconds": round(seconds, 1),
        "tokens_ratio": round(tokens_per_s["line"] / tokens_per_s["near"], 3),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()

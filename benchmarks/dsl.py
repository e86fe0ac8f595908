"""Two clients behind slow links, beside the same two without: syncs, false deaths, training lost.

    python benchmarks/dsl.py
        50 M parameters, `dsl`, ten syncs of 120 s; needs root, 25-40 minutes
    python benchmarks/dsl.py --profile wireless --syncs 3 --layers 2 --width 128 --every 20

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
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from attrs import define
from netlab.laboratory import Laboratory
from node_process import Nodes, sets_of

from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import LEDGER, read_ledger

CLIENTS = ("a", "b")
POLL_S = 5.0


@define
class Arm:
    """One run. `nodes`: its processes, on loopback or in a laboratory."""

    name: str
    nodes: Nodes

    @property
    def folder(self) -> Path:
        """Where its processes write."""
        return self.nodes.folder

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start the parameter server, then its clients once it listens."""
        lab, sets = self.nodes.lab, sets_of(settings)
        at = f"tcp://{'127.0.0.1' if lab is None else lab.address('server')}:0"
        self.nodes.start("server", "--role", "ps", at, "--run-dir", "ps", "--json", *sets)
        address = self.nodes.address("server")
        for name in CLIENTS:
            words = ("--role", "client", address, "--name", name, "--run-dir", name)
            self.nodes.start(name, *words, "--allow", "deltas,metrics")

    def facts(self, kind: str) -> list[dict[str, Any]]:
        """Facts of the parameter server's ledger."""
        path = self.folder / "ps" / LEDGER
        facts, _ = read_ledger(path) if path.exists() else ([], [])
        return [fact for fact in facts if fact["fact"] == kind]

    def deaths(self) -> int:
        """Sessions that did not end in order, by the parameter server's journal."""
        journal = JournalReader(self.folder / "ps" / "journal.jsonl", having=(b'"client_left"',))
        ended = [line for line in journal.read_all() if line["type"] == "client_left"]
        return sum(line["reason"] != "bye" for line in ended)


def result_of(arm: Arm, deaths: int) -> dict[str, Any]:
    """The result by a run's ledger; version 0 is the initial model, so counting starts after it."""
    merged = [fact for fact in arm.facts("version") if fact["version"] >= 1]
    sizes = [fact["update_bytes"] for fact in merged]
    taking_part = [{one["key"].partition("/")[0] for one in fact["merged"]} for fact in merged]
    taken = {one["key"]: one["tokens"] for fact in merged for one in fact["merged"]}
    made = [one for name in CLIENTS for one in snapshots(arm, name)[:-2]]
    return {
        "syncs": len(merged),
        "deaths": deaths,
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
@click.option("--every", "every_s", default=120.0, help="Seconds from one sync to the next.")
@click.option("--layers", default=16, show_default=True)
@click.option("--width", default=512, help="16 layers of 512 are 50 M parameters.")
@click.option("--format", "number_format", default="e4m3", show_default=True)
@click.option("--limit", "limit_s", default=5400.0, help="Seconds until the run is given up.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the runs here.")
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
) -> None:
    """Print a row."""
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
        arms = []
        for name in ("line", "near"):
            (home / name).mkdir(parents=True)
            lab = Laboratory(["server", *CLIENTS], profile=profile) if name == "line" else None
            where = lab and stack.enter_context(lab)
            arms.append(Arm(name, stack.enter_context(Nodes(home / name, where))))
            arms[-1].start(settings)
        reported: list[int] = []
        while time.monotonic() - begun < limit_s:
            done = [len(arm.facts("version")) - 1 for arm in arms]
            if done != reported:
                print(f"{time.monotonic() - begun:6.0f} s  syncs: {done}", file=sys.stderr)
                reported = done
            if min(done) >= syncs or any(arm.nodes.ended() for arm in arms):
                break
            time.sleep(POLL_S)
        deaths = {arm.name: arm.deaths() for arm in arms}  # the end of the run is no death
        for arm in arms:
            arm.nodes.interrupt()  # clients receive the last version
        head = {"bench": "dsl", "profile": profile, "layers": layers, "width": width}
        head |= {"format": number_format, "every_s": every_s}
        print(json.dumps({**head, **row_of(arms, deaths)}))


def row_of(arms: Sequence[Arm], deaths: Mapping[str, int]) -> dict[str, Any]:
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

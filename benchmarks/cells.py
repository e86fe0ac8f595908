"""Measures the bytes that a summing relay sends upstream, by the number of clients in its cell.

    python benchmarks/cells.py                 1 client without a relay; cells of 1, 10 and 100

Real: `fsl-node --role ps` and the relay in processes of their own; all clients in this one, each
with its thread, session, streams and codec (`ClientRuntime`). A run has 10 rounds of 81,920 values,
as many as LoRA of rank 8 on a small model; a client's deltas are random numbers. `up`, `down`: all
bytes on the sockets of the server upstream, handshakes and heartbeats included.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path

import click
import torch
from node_process import Nodes, sets_of

from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.learn.client.fed import Fed
from fsl_async.nodes.client.joining import context_of
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.process.stopper import Stopper

ROUNDS, VALUES, SAMPLES = 10, 81_920, 16
PORTS = {"upstream": 7460, "cell": 7461}


def play(address: str, number: int) -> None:
    """Be a client of a run to its end."""
    options = ClientOptions(address, f"c{number}", policy=SitePolicy(frozenset(KINDS)))
    runtime = ClientRuntime(options, stop=Stopper(), log=lambda _: None)
    try:
        member = runtime.wait_welcome()
        fed = Fed(runtime.training, context_of(options, member, lambda _: None), runtime)
        model = torch.nn.Linear(VALUES, 1, bias=False)
        fed.attach(model)
        chance = torch.Generator().manual_seed(number)
        for _ in fed.rounds():
            with torch.no_grad():
                model.weight += 1e-3 * torch.randn(model.weight.shape, generator=chance)
            fed.end_round(samples=SAMPLES)
    finally:
        runtime.training_ended(None)


def listening(nodes: Nodes, name: str) -> None:
    """Wait until a server listens."""
    log = nodes.folder / f"{name}.log"
    deadline = time.monotonic() + 60
    while "listening at" not in log.read_text():
        if time.monotonic() > deadline or nodes.processes[name].poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.1)


def measure(clients: int, *, relayed: bool) -> dict[str, object]:
    """Play a run."""
    begun = time.monotonic()
    run = {"sync.trigger": "rounds", "run.rounds": ROUNDS, "train.task": "own"}
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as nodes:
        members = 1 if relayed else clients
        sets = sets_of({**run, "sync.clients": members, "sync.min_clients": members})
        at = {name: f"127.0.0.1:{port}" for name, port in PORTS.items()}
        nodes.start("up", "--role", "ps", "--run-dir", "up.run", *sets, at["upstream"])
        listening(nodes, "up")
        if relayed:
            sets = sets_of({"sync.clients": clients, "sync.min_clients": clients})
            words = ("--role", "ps", "--upstream", at["upstream"], "--name", "cell")
            nodes.start("cell", *words, "--run-dir", "cell.run", *sets, at["cell"])
            listening(nodes, "cell")
        address = at["cell" if relayed else "upstream"]
        threads = [threading.Thread(target=play, args=(address, one)) for one in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(500)
        for process in nodes.processes.values():
            process.wait(60)
        lines = (Path(folder) / "up.run" / "journal.jsonl").read_text().splitlines()
        notes = [one for one in map(json.loads, lines) if "sockets" in str(one)]
        audits = [audit_run(path) for path in sorted(Path(folder).glob("*.run"))]
        return {
            "bench": "cells",
            "clients": clients,
            "relayed": relayed,
            **notes[-1]["sockets"],
            "merged": [one.merged for one in audits],
            "complaints": [line for one in audits for line in one.complaints()],
            "seconds": round(time.monotonic() - begun, 1),
        }


@click.command()
def main() -> None:
    """Print a row for each cell."""
    torch.set_num_threads(1)
    for clients, relayed in ((1, False), (1, True), (10, True), (100, True)):
        print(json.dumps(measure(clients, relayed=relayed)), flush=True)


if __name__ == "__main__":
    main()

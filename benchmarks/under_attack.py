"""A parameter server under attack: whether honest clients' syncs go on, how fast, at what memory.

    python benchmarks/under_attack.py
        all attacks, each for --rounds syncs (about three minutes)
    python benchmarks/under_attack.py --attack "fresh names" --rounds 5

The parameter server is `fsl-node --role ps` in its own process, two honest clients are light ones
in this process (`sync_clients.py`), the attackers (`attacks.py`) are in another. All share this
machine's processors, so `slower` (median sync under attack over that without, measured just before
in the same process) depends as much on two cores as on limits. `grown_mb` is the growth of the
parameter server's peak memory. `lost_sessions` counts sessions of honest clients that ended, and
must be 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
from attacks import ATTACKS, Attack, Recording, record
from node_process import Server, serving
from sync import manifest_of
from sync_clients import Crowd, SharedModel

from fsl_async.observe.journal import JournalReader
from fsl_codecs import CodecSpec
from fsl_transport.loop import run as run_loop

EVERY_S = 0.3
CLIENTS = 2


def _attack(name: str, address: str, recording: Recording, pipe: Any) -> None:
    attack = Attack(name, address, recording)
    attack.start()
    pipe.send("begun")
    pipe.recv()
    attack.stop()
    pipe.send((attack.steps, attack.problem))


async def _answer(pipe: Any, attacker: Any) -> Any:
    """The attacker's next report; the loop runs on meanwhile."""
    while not pipe.poll():
        if not attacker.is_alive():
            raise RuntimeError("the attacker died")
        await asyncio.sleep(0.05)
    return pipe.recv()


async def play(
    server: Server, model: SharedModel, name: str, rounds: int, warm_s: float
) -> dict[str, Any]:
    """Syncs without the attack, then under it."""
    crowd = Crowd(model, server.address, CLIENTS, EVERY_S)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    attacker: Any = None
    recording = record(crowd.clients[0].link, crowd.clients[0].name)
    try:
        await crowd.start()
        version = 0
        before = 0
        for attacked in (False, True):
            if attacked:
                before = server.memory_bytes("VmHWM")
                # Now, because the recording ends with the connection.
                attacker = multiprocessing.get_context("spawn").Process(
                    target=_attack, args=(name, server.address, recording, theirs), daemon=True
                )
                attacker.start()
                await _answer(ours, attacker)
                await asyncio.sleep(warm_s)
            for _ in range(rounds):
                version += 1
                begun = time.monotonic()
                await crowd.sync(version)
                seconds[attacked].append(time.monotonic() - begun)
        ours.send("stop")
        steps, problem = await _answer(ours, attacker)
        await crowd.sync(version + 1)  # after the attack, syncs go on
        peak = server.memory_bytes("VmHWM")
    finally:
        if attacker is not None and attacker.is_alive():
            attacker.terminate()
        await crowd.close()
    quiet, loud = (statistics.median(seconds[attacked]) for attacked in (False, True))
    return {
        "attack": name,
        "steps": steps,
        "problem": problem,
        "sync_s": round(quiet, 3),
        "attacked_s": round(loud, 3),
        "slower": round(loud / quiet, 2),
        "grown_mb": round((peak - before) / 1e6, 1),
    }


def drain(server: Server) -> None:
    """Read its output: a full pipe would stop it."""
    assert server.process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        while server.process.stdout.readline():
            pass


def measure(
    name: str, parameters: int, rounds: int, folder: Path | None = None, warm_s: float = 2.0
) -> dict[str, Any]:
    """One row."""
    model = SharedModel(manifest_of(parameters), CodecSpec(format="uniform"))
    work = Path(tempfile.mkdtemp(prefix="under-attack-", dir=folder))
    settings = {
        "sync.every_s": EVERY_S,
        "sync.quorum": 1.0,
        "sync.clients": CLIENTS + 1,
        "run.name": "attacked",
    }
    try:
        with serving(work / "run", settings) as server:
            threading.Thread(target=drain, args=(server,), daemon=True).start()
            row = run_loop(play(server, model, name, rounds, warm_s))
        lines = list(JournalReader(work / "run" / "journal.jsonl").read_all())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    left = [line for line in lines if line["type"] == "client_left"]
    row["lost_sessions"] = sum(
        line["peer"].startswith("client-") and line["reason"] != "superseded"
        for line in left[:-CLIENTS]
    )
    return row


@click.command()
@click.option("--attack", "names", multiple=True, type=click.Choice(list(ATTACKS)))
@click.option("--parameters", default=1_000_000, show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(names: tuple[str, ...], parameters: int, rounds: int) -> None:
    """Print a JSON line for each attack."""
    for name in names or ATTACKS:
        print(json.dumps(measure(name, parameters, rounds)), flush=True)


if __name__ == "__main__":
    main()

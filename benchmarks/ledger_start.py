"""How long a parameter server takes to start after a year, and with how much memory.

    python benchmarks/ledger_start.py
        50 clients, 52,560 versions: a sync every ten minutes (3 minutes; 1.5 GB in --folder)
    python benchmarks/ledger_start.py --clients 10 --versions 1000

It writes a ledger as such a run would have written it: an accepted line for every delta, a version
line for every sync, with metrics, through the functions that the store uses. The model has a few
values, so that only the ledger counts. Each row is a start (`Store.recover`) in a fresh process:

    all lines    there is no state, as after damage to it: the whole ledger is read; the start saves
                 the state
    state        the state is as old as it gets: rounds came after it until it is almost due

seconds is the start without imports; peak_mib is the VmHWM of the process, of which before_mib was
there before the start. save_ms is the writing of the state, which one of many commits waits for.
The ledger was written a moment ago, so it is read from memory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click
import numpy as np

from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta
from fsl_async.store.book.records import VersionRecord, to_fact
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.recovery.facts import STATE_FILE, LedgerState
from fsl_async.store.recovery.recovery import LEDGER_FILE, MANIFEST_FILE
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_async.store.versions.checkpoint import WEIGHTS, Checkpoints, VersionWriter

EVERY_S = 600.0
MIB = 1024 * 1024
SETTINGS = StoreSettings(keep_versions=3, resident=True)
MODEL = Manifest.from_shapes([("w", (8, 8))])
WEIGHTS_OF_ALL = np.zeros(MODEL.values, np.float32)


class Writer:
    """Writes the lines of a run. The file is not synced line by line: nothing depends on it."""

    def __init__(self, run_dir: Path, clients: int) -> None:
        self._run_dir = run_dir
        self._names = [f"site-{number:03d}.example" for number in range(clients)]
        self._rng = random.Random(1)
        self._digest = digest_of(WEIGHTS_OF_ALL)
        self._tokens = 0
        self.version = -1

    def first(self) -> None:
        """Write what a run begins with: its name, its clients and version 0."""
        members = {"format": 1, "tensors": MODEL.to_wire(), "frozen": []}
        (self._run_dir / MANIFEST_FILE).write_bytes(to_checksummed(members) + b"\n")
        with self._open() as file:
            self._line(file, "run", {"run": "year"})
            for index, name in enumerate(self._names):
                self._line(file, "lease", {"name": name, "index": index})
                self._line(file, "incarnation", {"name": name, "incarnation": 10**18 + index})
            self._version(file, ())

    def rounds(self, count: int, most_bytes: float = float("inf")) -> None:
        """Write `count` rounds, or as many as fit into `most_bytes`."""
        with self._open() as file:
            begin = file.tell()
            for _ in range(count):
                before = file.tell()
                self._version(file, tuple(self._deltas(file)))
                if 2 * file.tell() - before - begin > most_bytes:
                    break

    def _deltas(self, file: IO[bytes]) -> Iterator[MergedDelta]:
        for index, name in enumerate(self._names):
            key = DeltaKey(name, 10**18 + index, self.version, self.version + 1)
            metrics = {"loss": self._rng.random(), "snapshot_s": self._rng.random()}
            delta = Delta(key, self._digest, 1638400, 200, self.version, metrics)
            norm = self._rng.random()
            self._line(file, "accepted", to_fact(StoredDelta(delta, 123456789, norm, "e" * 64)))
            yield MergedDelta(delta, 0, 1638400.0, norm)

    def _version(self, file: IO[bytes], merged: tuple[MergedDelta, ...]) -> None:
        self.version += 1
        self._tokens += sum(one.delta.tokens for one in merged)
        self._record = VersionRecord(
            version=self.version,
            digest=self._digest,
            parent=self._digest,
            generation=0,
            fingerprint=MODEL.fingerprint,
            merged=merged,
            scale=1e-9,
            tokens_total=self._tokens,
            update_bytes=123456789,
            update_chunks=100,
            update_norm=self._rng.random(),
        )
        self._line(file, "version", self._record.to_fact())

    def _line(self, file: IO[bytes], fact: str, members: dict[str, Any]) -> None:
        up = round(EVERY_S * max(0, self.version) + self._rng.random(), 3)
        line = {"at": 1_750_000_000.0 + up, "up": up, "fact": fact, **members}
        file.write(to_checksummed(line) + b"\n")

    def _open(self) -> IO[bytes]:
        return (self._run_dir / LEDGER_FILE).open("ab", buffering=MIB)

    def checkpoint(self) -> None:
        """Write the newest version's folder."""
        files, pool = Files(), ChunkPool(1)
        checkpoints = Checkpoints(files, self._run_dir)
        checkpoints.directory.mkdir(exist_ok=True)
        with VersionWriter(files, checkpoints, self.version, MODEL) as writer:
            writer.flat(WEIGHTS).append(WEIGHTS_OF_ALL)
            writer.publish(self._record, writer.seal(pool))
        pool.close()


def memory_mib(name: str) -> float:
    """VmRSS (now) or VmHWM (the peak so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def start(run_dir: Path) -> dict[str, Any]:
    """Start once, in this process."""
    before = memory_mib("VmRSS")
    begin = time.perf_counter()
    store = Store(run_dir, SETTINGS)
    recovered = store.recover()
    seconds = time.perf_counter() - begin
    peak = memory_mib("VmHWM")
    run = store._open.run  # noqa: SLF001 - a commit would have to be due
    begin = time.perf_counter()
    LedgerState(Files(), run_dir, 0.0).save_if_due(run.ledger, run.book)
    save_s = time.perf_counter() - begin
    notices = list(store.notices)
    store.close()
    return {
        "version": recovered.version,
        "seconds": round(seconds, 3),
        "peak_mib": round(peak, 1),
        "before_mib": round(before, 1),
        "save_ms": round(1000 * save_s, 1),
        "notices": notices,
    }


def started(run_dir: Path) -> dict[str, Any]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--start", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@click.command()
@click.option("--clients", default=50, show_default=True)
@click.option("--versions", default=52_560, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="For the ledger.")
@click.option("--smoke", is_flag=True, help="The smallest run, for a test.")
@click.option("--start", "started_dir", type=click.Path(path_type=Path), hidden=True)
def main(
    *, clients: int, versions: int, folder: Path | None, smoke: bool, started_dir: Path | None
) -> None:
    """Measure both starts and print a row for each."""
    if started_dir is not None:
        click.echo(json.dumps(start(started_dir)))
        return
    if smoke:
        clients, versions = 3, 60
    with tempfile.TemporaryDirectory(dir=folder) as name:
        run_dir = Path(name)
        writer = Writer(run_dir, clients)
        writer.first()
        writer.rounds(versions)
        writer.checkpoint()
        for kind in ("all lines", "state"):
            row = {"start": kind, "clients": clients, **started(run_dir)}
            row["ledger_bytes"] = (run_dir / LEDGER_FILE).stat().st_size
            row["state_bytes"] = (run_dir / STATE_FILE).stat().st_size
            click.echo(json.dumps(row))
            writer.rounds(versions, SETTINGS.state_growth * row["state_bytes"])
            writer.checkpoint()


if __name__ == "__main__":
    main()

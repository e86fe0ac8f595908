"""A complete synchronization through a real parameter server: seconds per GB and client, and
memory.

    python benchmarks/sync.py
        100 M parameters, 1, 6 and 24 clients, fp32 and e4m3
    python benchmarks/sync.py --clients 1 --clients 6 --format uniform --parameters 25000000 \
            --parameters 100000000 --parameters 400000000
    python benchmarks/sync.py --clients 2 --format uniform --parameters 1000000000

The parameter server is `fsl-node --role ps` in its own process, over ZeroMQ on loopback, with its
spool and checkpoints on the disk that holds --folder. The clients are light ones in this process:
`benchmarks/sync_clients.py` lists which parts of them are real. Delta values are normal, so the
coded sizes are those of noise; nothing is compressed away. The run has a planned end, unless
--unplanned: then the server keeps the mean of its versions too, one vector more.

A row is the median over --rounds syncs after one that warms up. Times are read from the parameter
server's journal:
    sync_s       from the call until the last client reported the new version with its digest
    upload_s     ... until the last delta was durable (earlier ones are accumulated meanwhile)
    commit_s     until the next version was durable (rest of the accumulation, outer step, fsync of
                 the coded change)
    download_s   until all clients held it
    checkpoint_s from the last version until its weights were on disk too, in the background, at
                 most at SNAPSHOT_BYTES_PER_S; null if versions go from disk to disk
    s_per_gb_per_client   sync_s / (fp32 size of the model in GB) / clients
    lag_*_ms     how late the server's event loop ran a timer, ten times a second, over all rounds
Memory is the parameter server's VmHWM at the end minus its VmRSS when it began to listen, divided
by the fp32 size of the model. It includes version 0, a full fetch, and all rounds.

Limits of this machine, measured just before, in one thread each:
    floor_s          the bytes of a sync through a loopback socket once each way for each client,
                     its deltas and its coded change to the disk with fsync, and one pass over the
                     resident vectors, one after another. `floor_with_checkpoint_s` adds the bytes
                     of a checkpoint, which is not part of a sync unless versions go from disk to
                     disk: then sync_over_floor counts it.
    commit_floor_s   copy the resident vectors and the sum once, BLAKE3 of the weights, write and
                     fsync of as many bytes as the coded change has
server_cpu_s and clients_cpu_s are processor seconds during a sync, which other jobs on the machine
(load_1m) change less than they change sync_s. codec_cpu_s is the processor time of the codec's
calls, made alone in this process, times their number at the parameter server in a sync; codec_share
is codec_cpu_s / server_cpu_s.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import limits
import numpy as np
from attrs import define
from blake3 import blake3
from node_process import Server, serving
from sync_clients import Crowd, SharedModel

from fsl_async.config.rules import Format
from fsl_async.config.settings import CodecConfig
from fsl_async.observe.journal import JournalReader
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.versions.checkpoint import WEIGHTS
from fsl_codecs import decode, decode_accumulate, decode_into, encode, info
from fsl_transport.loop import run as run_loop

KEEP_VERSIONS = 2
STEP = 1.0
"""The step of uniform in a run of many rounds, in root mean squares of a block."""
GB = 1e9
TIMED_CHUNKS = 9
CHECKPOINT_TIMEOUT_S = 300.0
NEVER_REACHED = 10_000
"""Rounds of a run that is planned to end some day."""


def manifest_of(parameters: int) -> Manifest:
    """A model of that many values in a few matrices, as a transformer's would be."""
    width = max(1, int((parameters / 16) ** 0.5))
    shapes = [(f"layer{index}", (width, width)) for index in range(15)]
    left = parameters - 15 * width * width
    return Manifest.from_shapes([*shapes, ("rest", (left,))])


# --- reading the journal ------------------------------------------------------------------------


@define
class Times:
    """One version's times, on the parameter server's clock in seconds."""

    called: float
    deltas: int = 0
    stored: float = 0.0
    commit: float = 0.0
    committed: float = 0.0
    held: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def parts(self) -> dict[str, float]:
        """Seconds of each part."""
        return {
            "sync_s": self.held - self.called,
            "upload_s": self.stored - self.called,
            "commit_s": self.committed - self.stored,
            "download_s": self.held - self.committed,
        }


def read_times(path: Path) -> dict[int, Times]:
    """The times of every version after 0."""
    found: dict[int, Times] = {}
    called, was_call, version = 0.0, False, 0
    for line in JournalReader(path).read_all():
        now, name = line["now"], line["type"]
        is_call = name == "send" and line["message"]["type"] == "call/1"
        if is_call and not was_call:
            called = now
        was_call = is_call
        if name == "delta_stored":
            times = found.setdefault(version + 1, Times(called))
            times.deltas += 1
            times.stored = now
            times.bytes_up += line["stored"]["bytes"]
        elif name == "average":
            found[line["version"]].commit = now
        elif name == "version_committed":
            version = line["version"]
            if version:
                found[version].committed = now
                found[version].bytes_down = line["bytes_update"]
        elif name == "holding" and line["version"] in found:
            found[line["version"]].held = now
    return found


# --- a row --------------------------------------------------------------------------------------


def codec_seconds(model: SharedModel, clients: int) -> dict[str, float]:
    """Processor seconds of a parameter server's codec calls in one sync, made alone here."""
    room = np.zeros(model.manifest.longest_chunk, np.float32)

    def median_cpu_s(call: Callable[[bytes], object]) -> float:
        seconds = []
        for frame in model.delta[:TIMED_CHUNKS]:
            begun = time.thread_time()
            call(frame)
            seconds.append(time.thread_time() - begun)
        return statistics.median(seconds)

    delta = decode(model.delta[0])
    check = median_cpu_s(lambda frame: (info(frame), decode_into(frame, room)))
    add = median_cpu_s(lambda frame: decode_accumulate(frame, room, 0.5))
    make = median_cpu_s(lambda _: encode(delta, model.spec)) + median_cpu_s(
        lambda frame: decode_into(frame, room)
    )
    chunks = model.manifest.chunks
    return {
        "codec_cpu_s": chunks * (clients * (check + add) + make),
        "codec_check_ms_per_chunk": 1000 * check,
        "codec_add_ms_per_chunk": 1000 * add,
    }


def until_whole(run_dir: Path) -> float | None:
    """Seconds until the newest version's weights are on disk; None if they are there already."""
    begun = time.monotonic()
    weights = max((run_dir / "checkpoints").glob("v*")) / WEIGHTS
    if weights.exists():
        return None
    while not weights.exists():
        if time.monotonic() > begun + CHECKPOINT_TIMEOUT_S:
            raise RuntimeError(f"{weights} is not there after {CHECKPOINT_TIMEOUT_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - begun


async def play(
    server: Server, model: SharedModel, clients: int, rounds: int, every_s: float
) -> tuple[float | None, list[dict[str, float]]]:
    """Run all rounds. Returns the join's seconds, and each round's processor seconds and memory."""
    crowd = Crowd(model, server.address, clients, every_s)
    seen = []
    try:
        joined_s = await crowd.start()
        for version in range(1, rounds + 2):
            here, there = time.process_time(), server.cpu_s()
            await crowd.sync(version)
            seen.append(
                {
                    "server_cpu_s": server.cpu_s() - there,
                    "clients_cpu_s": time.process_time() - here,
                    "server_peak_bytes": server.memory_bytes("VmHWM"),
                }
            )
    finally:
        await crowd.close()
    return joined_s, seen


def lag_of(path: Path) -> dict[str, float]:
    """The event loop's lag, which a node writes at its end."""
    for line in JournalReader(path).read_all():
        if line["type"] == "node_ended":
            return {name: value for name, value in line.items() if name.startswith("lag_")}
    return {}


def commit_floor(vectors_bytes: int, update_bytes: int, folder: Path, memcpy_gb_s: float) -> float:
    """Seconds of the least that a commit must do, one thing after another."""
    weights = np.ones(32 * limits.MIB // 4, np.float32)
    begun = time.perf_counter()
    blake3(weights.data.cast("B")).digest()
    hash_gb_s = weights.nbytes / (time.perf_counter() - begun) / GB
    data = os.urandom(update_bytes)
    seconds = []
    for _ in range(limits.REPEATS):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begun = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begun)
    return (
        vectors_bytes / memcpy_gb_s / GB
        + vectors_bytes / 4 / hash_gb_s / GB
        + statistics.median(seconds)
    )


def measure(
    clients: int,
    coding: Format,
    parameters: int,
    rounds: int,
    folder: Path,
    *,
    small: bool,
    planned: bool = True,
) -> dict[str, Any]:
    """One row."""
    begun = time.monotonic()
    every_s = 0.5 if small else 4.0  # between two calls while no client has work
    limit = limits.measure(folder, small=small)
    model = SharedModel(manifest_of(parameters), CodecConfig(up=coding, up_step=STEP).spec_up)
    model_bytes = 4 * parameters
    work = Path(tempfile.mkdtemp(prefix="sync-", dir=folder))
    try:
        run_dir = work / "run"
        settings = {
            "codec.up": coding,
            "codec.down": coding,
            "codec.up_step": STEP,
            "codec.down_step": STEP,
            "sync.every_s": every_s,
            "sync.quorum": 1.0,
            "sync.clients": clients,
            "store.keep_versions": KEEP_VERSIONS,
            "run.rounds": NEVER_REACHED if planned else 0,
        }
        with serving(run_dir, settings) as server:
            joined_s, seen = run_loop(play(server, model, clients, rounds, every_s))
            checkpoint_s = until_whole(run_dir)
            start_bytes = server.start_bytes
        lag = lag_of(run_dir / "journal.jsonl")
        versions = read_times(run_dir / "journal.jsonl")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    counted = [versions[version] for version in range(2, rounds + 2)]
    if any(times.deltas != clients for times in versions.values()):
        raise RuntimeError("a round merged fewer deltas than there are clients: run it again")
    parts = {
        name: statistics.median(times.parts()[name] for times in counted)
        for name in counted[0].parts()
    }
    cpu = {
        name: statistics.median(one[name] for one in seen[1:])
        for name in ("server_cpu_s", "clients_cpu_s")
    }
    # weights, momentum and, where the format loses something, the residual
    vectors = 2 if coding == "fp32" else 3
    one = counted[0]
    moved = one.bytes_up + clients * one.bytes_down
    written = one.bytes_up + one.bytes_down
    checkpoint_floor_s = vectors * model_bytes / limit["disk_fsync_gb_s"] / GB
    floor_s = (
        moved / limit["socket_gb_s"] / GB
        + written / limit["disk_fsync_gb_s"] / GB
        + (vectors + 1) * model_bytes / limit["memcpy_gb_s"] / GB
    )
    commit_floor_s = commit_floor(
        (vectors + 1) * model_bytes, one.bytes_down, folder, limit["memcpy_gb_s"]
    )
    codec = codec_seconds(model, clients)
    peak = seen[-1]["server_peak_bytes"]
    row = {
        **parts,
        "s_per_gb_per_client": parts["sync_s"] / (model_bytes / GB) / clients,
        **cpu,
        **codec,
        "codec_share": codec["codec_cpu_s"] / cpu["server_cpu_s"],
        "server_start_mb": start_bytes / 1e6,
        "server_peak_mb": peak / 1e6,
        "peak_above_start_over_model": (peak - start_bytes) / model_bytes,
        "bits_up": 8 * counted[0].bytes_up / clients / parameters,
        "bits_down": 8 * counted[0].bytes_down / parameters,
        "join_full_s": joined_s,
        **limit,
        "floor_s": floor_s,
        "floor_with_checkpoint_s": floor_s + checkpoint_floor_s,
        "sync_over_floor": parts["sync_s"]
        / (floor_s if checkpoint_s is not None else floor_s + checkpoint_floor_s),
        "commit_floor_s": commit_floor_s,
        "commit_over_floor": parts["commit_s"] / commit_floor_s,
        "checkpoint_s": checkpoint_s,
        **lag,
        "load_1m": os.getloadavg()[0],
        "all_s": time.monotonic() - begun,
    }
    return {
        "bench": "sync",
        "clients": clients,
        "format": coding,
        "parameters": parameters,
        "rounds": rounds,
        "planned": planned,
        "sync_s_each": [round(times.parts()["sync_s"], 2) for times in counted],
        **{name: value if value is None else round(value, 3) for name, value in row.items()},
    }


@click.command()
@click.option("--clients", multiple=True, type=int, default=(1, 6, 24), show_default=True)
@click.option("--format", "formats", multiple=True, default=("fp32", "e4m3"), show_default=True)
@click.option("--parameters", "sizes", multiple=True, default=(100_000_000,), show_default=True)
@click.option("--rounds", default=3, show_default=True, help="After the one that warms up.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Disk to use.")
@click.option("--unplanned", is_flag=True, help="Without an end: the server keeps a mean too.")
@click.option("--smoke", is_flag=True, help="Tiny, to check that it works.")
def main(
    clients: tuple[int, ...],
    formats: tuple[Format, ...],
    sizes: tuple[int, ...],
    rounds: int,
    folder: Path | None,
    *,
    unplanned: bool,
    smoke: bool,
) -> None:
    """Measure synchronizations; print one JSON object a line."""
    if smoke:
        clients, formats, sizes, rounds = (3,), ("e4m3",), (300_000,), 1
    folder = folder or Path(tempfile.gettempdir())
    for parameters, coding, count in itertools.product(sizes, formats, clients):
        row = measure(count, coding, parameters, rounds, folder, small=smoke, planned=not unplanned)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

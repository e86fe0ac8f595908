"""A complete synchronization through a real parameter server: seconds per GB and client, and
memory.

    python benchmarks/sync.py
        100 M parameters, 1, 6 and 24 clients, fp32 and e4m3
    python benchmarks/sync.py --clients 6 --format e4m3 --rounds 5

The parameter server is `fsl-node --role ps` in its own process, over ZeroMQ on loopback, with its
spool and checkpoints on the disk that holds --folder. The clients are light ones in this process:
`benchmarks/sync_clients.py` lists which parts of them are real. Delta values are normal, so the
coded sizes are those of noise; nothing is compressed away.

A row is the median over --rounds syncs after one that warms up. Times are read from the parameter
server's journal:
    sync_s       from the call until the last client reported the new version with its digest
    upload_s     ... until the last delta was durable (earlier ones are accumulated meanwhile)
    commit_s     until the next version was durable (rest of the accumulation, outer step,
                 checkpoint)
    download_s   until all clients held it
    s_per_gb_per_client   sync_s / (fp32 size of the model in GB) / clients
Memory is the parameter server's VmHWM at the end minus its VmRSS when it began to listen, divided
by the fp32 size of the model. It includes version 0, a full fetch, and all rounds.

floor_s is the cost of the bytes at this machine's limits, measured just before: through a loopback
socket once each way for each client, and to the disk with fsync (spool and checkpoint), one after
another. server_cpu_s and clients_cpu_s are processor seconds during a sync, which other jobs on the
machine (load_1m) change less than they change sync_s. codec_cpu_s is the processor time of the
codec's calls, made alone in this process, times their number at the parameter server in a sync;
codec_share is codec_cpu_s / server_cpu_s.
"""

from __future__ import annotations

import asyncio
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
from server_process import Server, serving
from sync_clients import Crowd, SharedModel

from fsl_async.observe.journal import JournalReader
from fsl_async.store.manifest import Manifest
from fsl_codecs import CodecSpec, decode, decode_accumulate, decode_into, encode, info
from fsl_transport.loop import run as run_loop

KEEP_VERSIONS = 2
GB = 1e9
TIMED_CHUNKS = 9


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
        elif name == "version_held" and line["version"] in found:
            found[line["version"]].held = now
    return found


# --- a row --------------------------------------------------------------------------------------


def codec_seconds(model: SharedModel, clients: int) -> dict[str, float]:
    """Processor seconds of a parameter server's codec calls in one sync, made alone here."""
    room = np.zeros(model.manifest.chunk_values(0), np.float32)

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
        await asyncio.sleep(2.0)  # the journal flushes once a second
    finally:
        await crowd.close()
    return joined_s, seen


def measure(
    clients: int, coding: str, parameters: int, rounds: int, folder: Path, *, small: bool
) -> dict[str, Any]:
    """One row."""
    begun = time.monotonic()
    every_s = 0.5 if small else 4.0  # between two calls while no client has work
    limit = limits.measure(folder, small=small)
    model = SharedModel(manifest_of(parameters), CodecSpec(format=coding))
    model_bytes = 4 * parameters
    work = Path(tempfile.mkdtemp(prefix="sync-", dir=folder))
    try:
        run_dir = work / "run"
        settings = {
            "codec.up": coding,
            "codec.down": coding,
            "sync.every_s": every_s,
            "sync.quorum": 1.0,
            "sync.clients": clients,
            "store.keep_versions": KEEP_VERSIONS,
        }
        with serving(run_dir, settings) as server:
            joined_s, seen = run_loop(play(server, model, clients, rounds, every_s))
            start_bytes = server.start_bytes
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
    # weights, momentum and, where the format loses something, the residual; the update; the spool
    vectors = 2 if coding == "fp32" else 3
    written = vectors * model_bytes + counted[0].bytes_down + counted[0].bytes_up
    moved = counted[0].bytes_up + clients * counted[0].bytes_down
    floor_s = moved / limit["socket_gb_s"] / GB + written / limit["disk_fsync_gb_s"] / GB
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
        "sync_over_floor": parts["sync_s"] / floor_s,
        "load_1m": os.getloadavg()[0],
        "all_s": time.monotonic() - begun,
    }
    return {
        "bench": "sync",
        "clients": clients,
        "format": coding,
        "parameters": parameters,
        "rounds": rounds,
        "sync_s_each": [round(times.parts()["sync_s"], 2) for times in counted],
        **{name: value if value is None else round(value, 3) for name, value in row.items()},
    }


@click.command()
@click.option("--clients", multiple=True, type=int, default=(1, 6, 24), show_default=True)
@click.option("--format", "formats", multiple=True, default=("fp32", "e4m3"), show_default=True)
@click.option("--parameters", default=100_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="After the one that warms up.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Disk to use.")
@click.option("--smoke", is_flag=True, help="Tiny, to check that it works.")
def main(
    clients: tuple[int, ...],
    formats: tuple[str, ...],
    parameters: int,
    rounds: int,
    folder: Path | None,
    *,
    smoke: bool,
) -> None:
    """Measure synchronizations; print one JSON object a line."""
    if smoke:
        clients, formats, parameters, rounds = (3,), ("e4m3",), 300_000, 1
    for coding in formats:
        for count in clients:
            row = measure(
                count,
                coding,
                parameters,
                rounds,
                folder or Path(tempfile.gettempdir()),
                small=smoke,
            )
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

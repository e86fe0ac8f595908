"""What a split server's memory grows by with each client, beside what its configuration keeps.

    python benchmarks/split_server_memory.py > benchmarks/results/split_server_memory.jsonl
        (about ten minutes on two cores)
    python benchmarks/split_server_memory.py --table

Starts `fsl-node --role server` in its own process, and the parameter server and the clients in this
one: real sockets, real uploads, alignments and checkpoints, some rounds of each. One JSON object a
row, for 1, 2, 4 and 8 clients.

    kept        kept for one client, counted. fsl-sage: the auxiliary model, its Adam moments, the
                buffer of samples with their labels. splitfed-v1: the replica of the server-side
                model, its moments, and `in_flight` answers. Both: `in_flight` uploads, coded and
                decoded.
    grown       the highest resident memory of the split server beyond what it had on listening
    per_client  grown, minus that of the row with one client, for each client more
    beyond      (per_client - kept) / kept; the limit is 0.05
"""

from __future__ import annotations

import argparse
import contextlib
import json
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from node_process import Server, serving
from node_threads import play

from fsl_async.config.load import load
from fsl_async.learn.data.facts import described
from fsl_async.learn.split import build

RESULTS = Path(__file__).parent / "results" / "split_server_memory.jsonl"
SIDE = 32
WIDTHS = {"fsl-sage": 16, "splitfed-v1": 64}
"""Of the small CNN, cut at "pool1". fsl-sage: 16 KiB a sample at the cut, twice that of the
published ResNet-18. splitfed-v1: replicas of 8.7 MB.
"""


def settings(method: str, clients: int, *, smoke: bool) -> dict[str, Any]:
    """Settings of one row. Every buffer is full when the second round aligns."""
    samples = 64 if smoke else 1024
    return {
        "split.method": method,
        "split.listen": "tcp://127.0.0.1:0",
        "split.samples": samples if method == "fsl-sage" else 64,
        "split.buffer_samples": samples,
        "split.upload_every": 1,
        "split.align_every": 1,
        "split.align_passes": 1,
        "listen.address": "tcp://127.0.0.1:0",
        "sync.clients": clients,
        "sync.min_clients": clients,
        "run.rounds": 2,
        "data.holdout": 0.0,
        "session.expire_after_s": 120.0,
        "train.batch": 64 if method == "fsl-sage" and not smoke else 16,
        "train.threads": 1,
        "train.device": "cpu",
        "model.family": "small-cnn",
        "model.sizes": f"width={4 if smoke else WIDTHS[method]}",
        "split.cut": "pool1",
        "split.auxiliary": "linear",
    }


def kept_bytes(chosen: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that the split server keeps for one client, by purpose."""
    config = load(None, [f"{key}={json.dumps(value)}" for key, value in chosen.items()])
    parts = build.build_parts(described(config), at_client=False)
    values = int(config.model.sizes.partition("=")[2]) * (SIDE // 2) ** 2
    sample = 4 * values + 8  # fp32 activations, an int64 label
    under_way = config.split.in_flight * chosen["train.batch"]
    found = {"in_flight": under_way * (2 * values + sample)}  # in bf16, coded and decoded
    if chosen["split.method"] == "fsl-sage":
        assert parts.auxiliary is not None
        model = 4 * build.counted([parts.auxiliary]).values
        return found | {
            "model": model,
            "moments": 2 * model,
            "buffer": chosen["split.buffer_samples"] * sample,
        }
    assert parts.model.server is not None
    model = 4 * build.counted([parts.model.server]).values
    return found | {"model": model, "moments": 2 * model, "answers": under_way * 4 * values}


def write_images(folder: Path, samples: int) -> None:
    """Write random images in MNIST's layout."""
    rng = np.random.default_rng(0)
    found = {
        "images-idx3": rng.integers(0, 256, (samples, SIDE, SIDE)),
        "labels-idx1": np.arange(samples) % 10,
    }
    for name, values in found.items():
        head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        (folder / f"train-{name}-ubyte").write_bytes(head + values.astype(np.uint8).tobytes())


def train(folder: Path, chosen: Mapping[str, Any], server: Server) -> int:
    """Run parameter server and clients to the end; return the split server's peak memory."""
    overrides = [
        f"{key}={json.dumps(value)}"
        for key, value in {**chosen, "split.server": server.address}.items()
    ]
    (folder / "ps").mkdir()
    highest = 0

    def watch() -> None:
        nonlocal highest
        with contextlib.suppress(RuntimeError, OSError):
            highest = max(highest, server.memory_bytes("VmHWM"))

    names = [f"site-{number}" for number in range(chosen["sync.clients"])]
    play(load(None, overrides), folder / "ps", names, with_split_server=False, watch=watch)
    return highest


def row(method: str, clients: int, *, smoke: bool) -> dict[str, Any]:
    """Measure one."""
    chosen = settings(method, clients, smoke=smoke)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, clients * chosen["split.buffer_samples"])
        chosen = chosen | {"data.path": str(folder)}
        kept = kept_bytes(chosen)
        with serving(folder / "split", chosen, "server", listen="") as server:
            start = server.start_bytes
            highest = train(folder, chosen, server)
    return {
        "bench": "split_server_memory",
        "method": method,
        "clients": clients,
        "start": start,
        "grown": highest - start,
        "kept": sum(kept.values()),
        **{f"kept_{what}": size for what, size in kept.items()},
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the cost of each additional client."""
    first = {each["method"]: each for each in rows if each["clients"] == 1}
    found = []
    for each in rows:
        more = each["clients"] - 1
        if more and each["method"] in first:
            per_client = (each["grown"] - first[each["method"]]["grown"]) / more
            share = round((per_client - each["kept"]) / each["kept"], 4)
            each = {**each, "per_client": round(per_client), "beyond": share}  # noqa: PLW2901
        found.append(each)
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The table for docs/BENCHMARKS.md."""
    made = [
        "| method | clients | grown MB | kept for a client MB | per client more MB | beyond |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in compared(rows):
        more = (
            f"{each['per_client'] / 1e6:.2f} | {each['beyond']:+.1%}" if "beyond" in each else " | "
        )
        made.append(
            f"| {each['method']} | {each['clients']} | {each['grown'] / 1e6:.1f} | "
            f"{each['kept'] / 1e6:.2f} | {more} |"
        )
    return made


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="fsl-sage,splitfed-v1")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
    parser.add_argument("--table", action="store_true", help="print the kept rows as a table")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table([json.loads(line) for line in RESULTS.read_text().splitlines()])))
        return
    torch.set_num_threads(1)
    for method in options.methods.split(","):
        rows: list[dict[str, Any]] = []
        for clients in map(int, options.clients.split(",")):
            rows.append(row(method, clients, smoke=options.smoke))
            print(json.dumps(compared(rows)[-1]), flush=True)


if __name__ == "__main__":
    main()

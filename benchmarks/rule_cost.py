"""GB of deltas (as fp32) that each aggregation rule merges a second, spool and outer step included.

    python benchmarks/rule_cost.py [--clients 8] [--parameters 10000000]

A row is one commit of deltas that are already in the spool, by the Store.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from sync import manifest_of

from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.store.rules.aggregation import RULES, rule_named
from fsl_async.store.rules.outer import Average
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode


def rows(clients: int, parameters: int) -> Iterator[dict[str, Any]]:
    """A row for each rule."""
    manifest = manifest_of(parameters)
    values = np.random.default_rng(0).standard_normal(manifest.longest_chunk, np.float32)
    lengths = {manifest.chunk_values(index) for index in range(manifest.chunks)}
    frames = {size: encode(values[:size], CodecSpec("uniform")) for size in lengths}
    weights = {
        size: encode(values[:size] * np.float32(0.02), CodecSpec("fp32")) for size in lengths
    }
    for name in RULES:
        with tempfile.TemporaryDirectory() as folder:
            settings = StoreSettings(2, CodecSpec("uniform"), Average(), rule=rule_named(name, 1))
            store = Store(Path(folder) / "run", settings)
            store.recover()
            store.begin_initial(manifest)
            for index in range(manifest.chunks):
                store.write_initial(index, weights[manifest.chunk_values(index)])
            store.finish_initial()
            deltas = [
                Delta(DeltaKey(f"client-{number}", 1, 0, 1), store.digest, 10, 1)
                for number in range(clients)
            ]
            for delta in deltas:
                store.spool_begin(delta)
                for index in range(manifest.chunks):
                    store.spool_write(delta.key, index, frames[manifest.chunk_values(index)])
                store.spool_finish(delta.key)
            begun, cpu = time.perf_counter(), time.process_time()
            store.commit(1, [MergedDelta(delta, 0, 1.0) for delta in deltas], 1 / clients)
            seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            store.close()
        gigabytes = 4 * parameters * clients / 1e9
        yield {
            "cost": name,
            "clients": clients,
            "parameters": parameters,
            "gb_per_s": round(gigabytes / seconds, 3),
            "gb_per_cpu_s": round(gigabytes / cpu_s, 3),
        }


@click.command()
@click.option("--clients", type=click.IntRange(min=5), default=8, show_default=True)
@click.option("--parameters", default=10_000_000, show_default=True)
def main(*, clients: int, parameters: int) -> None:
    """Print a JSON line for each rule."""
    for row in rows(clients, parameters):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

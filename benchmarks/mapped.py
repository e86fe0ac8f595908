"""How long the store of a large model takes where memory is short: vectors mapped from files.

    python benchmarks/mapped.py                                1 B parameters, 1.5 models of memory
    python benchmarks/mapped.py --parameters 100000000 --clients 3 --commits 3

Root only: the process that holds the store is in a memory control group (v1 or v2) of its own, so
that the kernel drops pages as on a machine of that size. Each row is a step of that process: its
seconds, and its memory in models (4 bytes a parameter): `anonymous` cannot be dropped, `peak` is
the most that was resident. The values are random, a tenth of them large, and the same in all
chunks. The last row writes a file of a model, durably, in the same group, which is the limit of the
disk: a commit reads and writes about three models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import numpy as np

from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def group_of(limit_bytes: int) -> Path:
    """Make a control group with a limit of memory."""
    is_v1 = V1.is_dir()
    group = (V1 if is_v1 else V2) / f"fsl-mapped-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
    return group


def memory(name: str) -> int:
    """Return a figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(one.split()[1]) for one in lines if one.startswith(f"{name}:"))


def steps(folder: Path, parameters: int, clients: int, commits: int) -> None:
    """Make versions in a store, and print a row for each step."""

    def row(step: str, act: Callable[[], object]) -> None:
        begun_at = time.monotonic()
        act()
        seconds = round(time.monotonic() - begun_at, 2)
        model = 4 * parameters
        held = {"anonymous": memory("RssAnon") / model, "peak": memory("VmHWM") / model}
        figures = {name: round(value, 3) for name, value in held.items()}
        print(json.dumps({"bench": "mapped", "step": step, "seconds": seconds, **figures}))
        sys.stdout.flush()

    manifest = Manifest.from_shapes([("w", (parameters,))])
    store = Store(folder / "run", StoreSettings(resident=False, threads=os.cpu_count() or 1))
    store.recover()
    values = np.random.default_rng(1).standard_normal(manifest.longest_chunk).astype(np.float32)
    values[::10] *= 10.0
    lossless, coded = CodecSpec("fp32"), CodecSpec("uniform")
    lengths = [manifest.chunk_values(index) for index in range(manifest.chunks)]

    def publish() -> None:
        store.begin_initial(manifest)
        for index, length in enumerate(lengths):
            store.write_initial(index, encode(values[:length], lossless))
        store.finish_initial()

    sent: list[DeltaKey] = []

    def deltas(version: int) -> None:
        sent.clear()
        for client in range(clients):
            key = DeltaKey(f"c{client}", 1, version, version)
            store.spool_begin(Delta(key, store.digest, 1, 10))
            for index, length in enumerate(lengths):
                store.spool_write(key, index, encode(values[:length], coded))
            store.spool_finish(key)
            sent.append(key)

    def commit(version: int) -> None:
        merged = [MergedDelta(Delta(key, "", 1, 10), 0, 1.0) for key in sent]
        store.commit(version, merged, 1.0 / clients)

    row("version 0", publish)
    for version in range(1, commits + 1):
        row(f"{clients} deltas", partial(deltas, version - 1))
        row(f"commit {version}", partial(commit, version))
        row(f"snapshot {version}", store.finish_snapshot)
    store.close()

    def copy() -> None:
        with (folder / "copy").open("wb") as file:
            for length in lengths:
                file.write(values[:length].data)
            file.flush()
            os.fsync(file.fileno())

    row("a model written, durably", copy)


@click.command(help=__doc__.split("\n", maxsplit=1)[0])
@click.option("--parameters", default=1_000_000_000)
@click.option("--models", default=1.5, help="Memory limit, in models of 4 bytes a parameter.")
@click.option("--clients", default=1)
@click.option("--commits", default=2)
@click.option("--folder", type=click.Path(path_type=Path), help="Disk to use.")
@click.option("--inside", is_flag=True, hidden=True)
@click.option("--smoke", is_flag=True, help="Tiny and without a limit, to check that it works.")
def main(  # noqa: PLR0917 - options
    parameters: int,
    models: float,
    clients: int,
    commits: int,
    folder: Path | None,
    inside: bool,
    smoke: bool,
) -> None:
    """Run the steps in a process of their own, within the limit."""
    if smoke:
        parameters, commits, inside = 300_000, 1, True
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if inside:
            steps(Path(temporary), parameters, clients, commits)
            return
        group = group_of(int(models * 4 * parameters))
        asked = [f"--parameters={parameters}", f"--clients={clients}", f"--commits={commits}"]
        try:
            subprocess.run(
                [sys.executable, __file__, "--inside", f"--folder={temporary}", *asked],
                check=True,
                process_group=0,
                preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            )
        finally:
            group.rmdir()


if __name__ == "__main__":
    main()

"""How late a client's event loop runs while it trains: the delay that heartbeats must tolerate.

    python benchmarks/loop_lag.py

A client as in production, in this process: training (the built-in task) in one thread, the event
loop with session and shell in another, codec and rebase work in a third, against a real `fsl-node
--role ps` process that calls for a sync every few seconds. `fsl_async.nodes.runtime` measures the
loop's lag: how much later than asked a timer fires, ten times a second, from the first training
step to the last, so without the import of torch. Before each case it is measured on an idle loop in
a thread of this process. With uvloop the clock of a loop counts whole milliseconds.

A step has few sequences (--batch), so that a case has some steps on a small machine; the lag comes
from the interpreter lock and the processor, which a larger batch holds less often.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import click
import torch
from node_process import serving

from fsl_async.config.load import to_wire
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.runtime import LoopLag
from fsl_async.process.stopper import Stopper
from fsl_transport.loop import run as run_loop


def idle_lag(seconds: float) -> dict[str, float]:
    """The lag of an idle loop, in a thread beside one that sleeps."""
    found: dict[str, float] = {}

    async def wait() -> None:
        lag = LoopLag(asyncio.get_running_loop())
        await asyncio.sleep(seconds)
        found.update(lag.summary())
        lag.close()

    thread = threading.Thread(target=lambda: run_loop(wait()))
    thread.start()
    thread.join()
    return found


class MeasuredFed(Fed):
    """A Fed that measures the lag of the client's loop from the first step on."""

    def __init__(self, runtime: ClientRuntime, place: ClientContext) -> None:
        super().__init__(runtime.training, place)
        self.lag: LoopLag | None = None
        self.summary: dict[str, float] = {}
        self.begun = 0.0
        self.seconds = 0.0
        node = runtime._node  # noqa: SLF001 - the loop whose lag is the question
        assert node is not None
        self._its_loop = node.loop

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Begin to measure in the first step; keep the summary of the last step that had one."""
        if not self.begun:
            self.begun = time.monotonic()
            self._its_loop.call_soon_threadsafe(self._begin)
        running = super().step(tokens=tokens, metrics=metrics)
        if running and self.lag is not None:
            self.summary = self.lag.summary()
            self.seconds = time.monotonic() - self.begun
        return running

    def _begin(self) -> None:
        self.lag = LoopLag(self._its_loop)


def silent(_: str) -> None:
    """Drop the node's own messages."""


def measure(
    preset: str, threads: int, batch: int, seconds: float, every_s: float
) -> dict[str, Any]:
    """One case."""
    idle = idle_lag(min(10.0, seconds))
    settings = {
        "sync.every_s": every_s,
        "sync.clients": 1,
        "run.seconds": seconds,
        "model.preset": preset,
        "train.batch": batch,
        "train.threads": threads,
    }
    with (
        tempfile.TemporaryDirectory(prefix="loop-lag-") as folder,
        serving(Path(folder) / "run", settings) as server,
    ):
        options = ClientOptions(server.address, "client")
        runtime = ClientRuntime(options, stop=Stopper(), log=silent)
        error: str | None = "failed"
        try:
            member = runtime.wait_welcome()
            place = ClientContext("client", config=to_wire(member.config), log=silent)
            fed = MeasuredFed(runtime, place)
            pretrain.train(fed)
            error = None
        finally:
            runtime.training_ended(error)
        runtime.raise_failure()
        summary = runtime.summary()
    row = {
        "bench": "loop_lag",
        "preset": preset,
        "torch_threads": threads,
        "batch": batch,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(fed.seconds, 1),
        "steps": summary.steps,
        "syncs": summary.version,
        **fed.summary,
        **{f"idle_{name}": value for name, value in idle.items()},
        "load_1m": round(os.getloadavg()[0], 2),
    }
    for name in ("median", "p99"):
        lag, base = fed.summary.get(f"lag_{name}_ms"), idle.get(f"lag_{name}_ms")
        if lag and base:
            row[f"{name}_over_idle"] = round(lag / base, 2)
    return row


@click.command()
@click.option("--preset", "presets", multiple=True, default=("0.5m", "10m"), show_default=True)
@click.option("--threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--batch", default=2, show_default=True, help="Sequences in a step.")
@click.option("--seconds", default=60.0, show_default=True, help="Of each case.")
@click.option("--every", "every_s", default=4.0, show_default=True, help="Seconds between syncs.")
@click.option("--smoke", is_flag=True, help="Short, to see that it works.")
def main(
    presets: tuple[str, ...],
    threads: tuple[int, ...],
    batch: int,
    seconds: float,
    every_s: float,
    *,
    smoke: bool,
) -> None:
    """Measure the loop's lag; print one JSON object a line."""
    if smoke:
        presets, threads, seconds, every_s = ("0.5m",), (1,), 4.0, 1.0
    torch.set_num_threads(max(threads))
    for preset in presets:
        for count in threads:
            print(json.dumps(measure(preset, count, batch, seconds, every_s)), flush=True)


if __name__ == "__main__":
    main()

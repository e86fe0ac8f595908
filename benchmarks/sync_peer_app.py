"""A Flower app for benchmarks/sync_peer_superlink.py: FedAvg of one array, and no training.

Flower keeps messages as pieces named by their hash, and moves equal pieces once. So no two pieces
are equal here: values count up, and differ by client and round.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Answer at once."""
    values = np.arange(context.run_config["parameters"], dtype=np.float32)
    values += context.node_config["index"] + message.content["config"]["server-round"]
    records = {"arrays": ArrayRecord([values]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(records), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and write what was measured to the file `out`."""
    config = context.run_config
    clients, rounds = config["clients"], config["rounds"]
    begun = 0.0
    seconds = []

    class Timed(FedAvg):
        """Times each round from its orders to its mean, once all clients are there."""

        def configure_train(self, *arguments: Any) -> Any:
            """Begin a round."""
            nonlocal begun
            while len(list(grid.get_node_ids())) < clients:
                time.sleep(0.1)
            begun = time.monotonic()
            return super().configure_train(*arguments)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            """End a round."""
            answers = list(replies)
            if len(answers) != clients or any(one.has_error() for one in answers):
                raise RuntimeError("a client failed")
            done = super().aggregate_train(server_round, answers)
            seconds.append(time.monotonic() - begun)
            return done

    start_bytes = memory_bytes("VmRSS")
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    model = ArrayRecord([np.zeros(config["parameters"], np.float32)])
    result = strategy.start(grid, model, num_rounds=rounds)
    (mean,) = result.arrays.to_numpy_ndarrays()
    found = {
        "seconds": seconds,
        "bytes": sum(len(array.data) for array in result.arrays.values()),
        "mean": float(mean[0]),
        "start_bytes": start_bytes,
        "peak_bytes": memory_bytes("VmHWM"),
        "version": importlib.metadata.version("flwr"),
    }
    out = Path(config["out"])
    out.with_suffix(".part").write_text(json.dumps(found))
    out.with_suffix(".part").rename(out)


def memory_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (the peak so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {name} in /proc/self/status")

"""Clients of several ranks: what the node costs a step, and what a killed rank costs.

    python benchmarks/gang.py cost --layers 12 --width 4096     800 MB of weights a client
    python benchmarks/gang.py kills --kills 20

cost: the same loop in the same ranks, first without a node and then in a run; a row with the median
seconds of a step in both, the rate of the second against the first, and the longest `fed.step`.
Every process runs on this machine, the parameter server too.

kills: SIGKILL to one rank, again and again; a row per kill with the seconds until all ranks train
again, and one with what the ledger says and what is left of shared memory.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from node_process import Nodes, sets_of

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.tools.demo.fsdp import ranks_of


def row(**values: object) -> None:
    """Print a row."""
    print(json.dumps(values), flush=True)


def start(nodes: Nodes, arguments: argparse.Namespace) -> None:
    """Start a parameter server, and one client of several ranks with this file's task."""
    settings = {"sync.every_s": arguments.every, "sync.clients": 1}
    words = ("--run-dir", "run", "--json", *sets_of({**settings, "train.task": "own"}))
    nodes.start("server", "--role", "ps", "tcp://127.0.0.1:0", *words)
    nodes.start(
        "client", "--role", "client", nodes.address("server"), "--name", "gang",
        "--task", f"{Path(__file__).resolve()}:train", "--ranks", arguments.ranks,
        "--max-restarts", 1000, "--allow", "deltas,metrics",
        GANG_LAYERS=arguments.layers, GANG_WIDTH=arguments.width, GANG_ROWS=arguments.rows,
        GANG_ALONE=arguments.alone if arguments.what == "cost" else 0,
    )  # fmt: skip


def shared_memory() -> set[str]:
    """Shared memory with a name of Python's or torch's: other programs here may have some too."""
    names = (path.name for path in Path("/dev/shm").iterdir())
    return {name for name in names if name.startswith(("psm", "torch"))}


def cost(nodes: Nodes, arguments: argparse.Namespace) -> None:
    """Let it train for some seconds, and print what rank 0 has measured."""
    nodes.line("client", "published the initial weights")
    time.sleep(arguments.seconds)
    nodes.interrupt("server")
    found = nodes.line("client", '{"gang"')
    row(
        **{**json.loads(found), "ranks": arguments.ranks, "load_1min": round(os.getloadavg()[0], 1)}
    )


def kills(nodes: Nodes, arguments: argparse.Namespace) -> None:
    """Kill ranks, and audit the ledger."""
    before = shared_memory()
    took = []
    nodes.line("client", "published the initial weights")
    for number in range(1, arguments.kills + 1):
        nodes.line("server", "client merged", number)
        time.sleep(0.37 * number % 2.0)
        pids = ranks_of(nodes.processes["client"].pid)
        begun = time.monotonic()
        os.kill(pids[number % len(pids)], signal.SIGKILL)
        nodes.line("client", "ranks are here", number + 1)
        took.append(time.monotonic() - begun)
        row(kill=number, back_s=round(took[-1], 2))
    nodes.line("server", "client merged", arguments.kills + 2)
    nodes.interrupt("server")
    audit = audit_run(nodes.folder / "run")
    row(
        kills=arguments.kills,
        back_median_s=round(statistics.median(took), 2),
        back_longest_s=round(max(took), 2),
        merged=audit.merged,
        lost=len(audit.lost),
        doubled=len(audit.doubled),
        complaints=len(audit.complaints()),
        torn=nodes.text("server").count("quarantined"),
        left_in_dev_shm=len(shared_memory() - before),
        client_exit=nodes.processes["client"].returncode,
        load_1min=round(os.getloadavg()[0], 1),
    )


def train(fed: Any) -> None:
    """The task: a stack of matrices under FSDP2."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers, width = int(os.environ["GANG_LAYERS"]), int(os.environ["GANG_WIDTH"])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = model.to(fed.device)
    mesh = init_device_mesh(fed.device.type, (fed.ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(int(os.environ["GANG_ROWS"]), width, device=fed.device)

    def step() -> float:
        begun = time.monotonic()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        return time.monotonic() - begun

    alone = [step() for _ in range(int(os.environ["GANG_ALONE"]))]
    fed.attach(model)
    steps, stalls, going = [], [], True
    while going:
        took = step()
        begun = time.monotonic()
        going = fed.step(tokens=len(batch))
        stalls.append(time.monotonic() - begun)
        steps.append(took + stalls[-1])
    if fed.rank or not alone:
        return
    last = stalls.pop()  # waits for the end of the run: no training is held up
    steps.pop()
    with_node = statistics.mean(steps[2:])
    without = statistics.mean(alone[2:])
    found = {
        "gang": "cost",
        "device": fed.device.type,
        "megabytes": round(4e-6 * layers * width * width),
        "steps_alone": len(alone),
        "alone_mean_s": round(without, 4),
        "steps": len(steps),
        "mean_s": round(with_node, 4),
        "rate": round(without / with_node, 4),
        "median_rate": round(statistics.median(alone[2:]) / statistics.median(steps[2:]), 4),
        "longest_fed_step_s": round(max(stalls), 4),
        "fed_steps_s": [round(one, 4) for one in sorted(stalls)[-6:]],
        "fed_step_median_s": round(statistics.median(stalls), 6),
        "last_fed_step_s": round(last, 4),
        "version": fed.version,
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cost", "kills"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="in the batch of each rank")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between syncs")
    parser.add_argument("--alone", type=int, default=20, help="cost: steps without a node")
    parser.add_argument("--seconds", type=float, default=60.0, help="cost: of training in the run")
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fsl-gang-") as folder, Nodes(Path(folder)) as nodes:
        start(nodes, arguments)
        {"cost": cost, "kills": kills}[arguments.what](nodes, arguments)


if __name__ == "__main__":
    main()

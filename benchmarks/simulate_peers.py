"""Simulated federated averaging beside Flower's simulation and a plain loop, on this machine.

    pip install --target PEERS 'flwr[simulation]==1.42.0' scikit-learn
    PYTHONPATH=PEERS python benchmarks/simulate_peers.py            (about 6 minutes on two cores)
    python benchmarks/simulate_peers.py --way plain --way simulate --repeats 1

All ways train one function (`local_steps`): a CNN of 103,930 values on images of 3x32x32, two
convolutions of 3x3 (16 and 32 channels, padded, each with max pooling of 2), 48 hidden units and 10
classes. 100 clients of 100 images, all in each round, 10 steps of SGD with batches of 10, federated
averaging (arXiv:1602.05629). One thread of torch in each process.

    plain       a loop in one process: clients one after another, a mean of their weights
    flower      Flower's simulation on Ray, two actors of one CPU each
    simulate    `fsl_async.simulate` in one process: deltas coded as by default, a real store
    workers     the same with two worker processes

The images are the digits of scikit-learn (1,797 of 8x8), enlarged, shifted, tinted and with noise;
each client draws its 100 from the first 1,300, the others are held out. Without scikit-learn they
are patterns with noise (`images`: "synthetic").

A row is one run; ways take turns, so that rows of one `repeat` are of the same minutes. round_s:
median of the seconds from round to round, without the first; over_plain: that, beside the plain
loop of the same repeat. cpu_round_s: processor seconds of a round, of all processes of the run;
other work on the machine changes them less. peak_mb: the most that all these processes had together
(PSS, every half second). accuracy: of the last weights, on the held-out images. A row with
`skipped` says why there are no figures.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import fsl_async

STEPS, BATCH, IMAGES, RATE = 10, 10, 100, 0.1
VALUES = 103_930
KNOWN, SIDE, NOISE = 1300, 32, 0.1
SAMPLE_S = 0.5
TOKEN, TASK = "SIMULATE_PEERS_RUN", "SIMULATE_PEERS_TASK"
"""Variables of the environment: a mark of all processes of a run, and what they are to do."""


@functools.cache
def task() -> dict[str, Any]:
    """Return what this run is about: way, clients, rounds, folder."""
    found: dict[str, Any] = json.loads(os.environ[TASK])
    return found


# --- what all ways train --------------------------------------------------------------------------


def build() -> nn.Module:
    """Return the CNN with its first weights, the same in each process."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )
    assert sum(one.numel() for one in net.parameters()) == VALUES
    return net


def sources() -> tuple[Tensor, Tensor, str]:
    """Return images float32 (N, 1, SIDE, SIDE) from 0 to 1, labels int64 (N,), and their kind."""
    if find_spec("sklearn") is None:
        labels = torch.arange(KNOWN + 500) % 10
        patterns = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        small, kind = patterns[labels], "synthetic"
    else:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found,unused-ignore]

        digits = load_digits()
        small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels, kind = torch.tensor(digits.target, dtype=torch.int64), "digits"
    return F.interpolate(small, size=SIDE, mode="bilinear"), labels, kind


def prepare(folder: Path, clients: int) -> str:
    """Write the images of all clients, then the held-out ones; return their kind."""
    images, labels, kind = sources()
    rng = torch.Generator().manual_seed(0)
    ours = torch.randint(0, KNOWN, (clients * IMAGES,), generator=rng)
    chosen = torch.cat([ours, torch.arange(KNOWN, len(labels))])
    made = torch.empty(len(chosen), 3, SIDE, SIDE)
    for row, at in enumerate(chosen):
        shift = torch.randint(-3, 4, (2,), generator=rng)
        tint = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=rng)
        made[row] = tint * torch.roll(images[at], (int(shift[0]), int(shift[1])), (1, 2))
    made += NOISE * torch.randn(made.shape, generator=rng)
    np.save(folder / "images.npy", (255 * made.clamp(0, 1)).to(torch.uint8).numpy())
    np.save(folder / "labels.npy", labels[chosen].numpy())
    return kind


@functools.cache
def opened() -> tuple[np.ndarray, np.ndarray]:
    """Return all images, mapped, uint8 (N, 3, SIDE, SIDE), and labels, int64 (N,)."""
    data = Path(task()["data"])
    return np.load(data / "images.npy", mmap_mode="r"), np.load(data / "labels.npy")


def images_from(start: int, end: int | None) -> tuple[Tensor, Tensor]:
    """Return some images, float32 from 0 to 1, and their labels."""
    images, labels = opened()
    return torch.from_numpy(images[start:end] / np.float32(255)), torch.from_numpy(
        labels[start:end]
    )


def local_steps(net: nn.Module, client: int, number: int) -> Iterator[float]:
    """Train a client's round `number`; yields the loss after each step."""
    images, labels = images_from(client * IMAGES, (client + 1) * IMAGES)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(1000 * number + client))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for batch in order[: STEPS * BATCH].split(BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


@torch.no_grad()
def accuracy_of(net: nn.Module) -> float:
    """Return the share of held-out images that the net has right."""
    images, labels = images_from(task()["clients"] * IMAGES, None)
    return float((net(images).argmax(1) == labels).float().mean())


def mark() -> None:
    """Note that a round begins."""
    with Path(task()["folder"], "marks").open("a") as file:
        file.write(f"{time.time()}\n")


# --- ways -----------------------------------------------------------------------------------------


def plain() -> nn.Module:
    """Train clients one after another, and average their weights."""
    net = build()
    weights = {name: one.clone() for name, one in net.state_dict().items()}
    for number in range(task()["rounds"]):
        mark()
        sums = {name: torch.zeros_like(one) for name, one in weights.items()}
        for client in range(task()["clients"]):
            net.load_state_dict(weights)
            for _ in local_steps(net, client, number):
                pass
            for name, one in net.state_dict().items():
                sums[name] += one
        weights = {name: one / task()["clients"] for name, one in sums.items()}
    mark()
    net.load_state_dict(weights)
    return net


def flower() -> nn.Module:
    """Run Flower's simulation: FedAvg, without its evaluation at clients."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, net = ClientApp(), ServerApp(), build()

    class All(FedAvg):
        """Fails where the answer of a client is missing."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            found = list(replies)
            missing = task()["clients"] - sum(one.has_content() for one in found)
            if missing:
                raise RuntimeError(f"{missing} clients failed in round {server_round}")
            return super().aggregate_train(server_round, found)

    @client_app.train()
    def train_client(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        mine = build()
        mine.load_state_dict(message.content["arrays"].to_torch_state_dict())
        number = int(message.content["config"]["server-round"]) - 1
        losses = list(local_steps(mine, int(context.node_config["partition-id"]), number))
        metrics = MetricRecord({"loss": losses[-1], "num-examples": IMAGES})
        content = RecordDict({"arrays": ArrayRecord(mine.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @server_app.main()
    def serve(grid: Grid, _: Context) -> None:
        clients = task()["clients"]
        # by default, clients that have not connected yet are left out of the first round
        strategy = All(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=task()["rounds"],
            evaluate_fn=lambda *_: mark(),  # before the first round, and after each
        )
        net.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        task()["clients"],
        backend_config={
            "init_args": {"num_cpus": 2},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return net


def train(fed: Any) -> None:
    """Train by the run's rounds: the function that `fsl_async.simulate` runs at each client."""
    torch.set_num_threads(1)
    net, (client, _) = build(), fed.part
    fed.attach(net)
    for number in fed.rounds():
        if client == 0:
            mark()
        for _ in local_steps(net, client, number):
            pass
        fed.end_round(samples=IMAGES)
    if client == 0:
        mark()


def simulate(workers: int = 1) -> nn.Module:
    """Simulate the run; return its newest version, read from the run directory."""
    from fsl_async.learn.client.buffers import ModelWeights
    from fsl_async.tools.versions import load_last

    run_dir = Path(task()["folder"], "run")
    fsl_async.simulate(
        f"{Path(__file__).resolve()}:train",
        clients=task()["clients"],
        settings={
            "sync.trigger": "rounds",
            "sync.min_clients": task()["clients"],
            "sync.quorum": 1.0,
            "run.rounds": task()["rounds"],
            "outer.optimizer": "average",
        },
        seed=0,
        step_seconds=1.0,
        workers=workers,
        run_dir=run_dir,
    )
    net = build()
    load_last(run_dir, ModelWeights(net))
    return net


WAYS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "flower": flower,
    "simulate": simulate,
    "workers": functools.partial(simulate, 2),
}


# --- one run --------------------------------------------------------------------------------------


def look(token: str, cpu_s: dict[str, float]) -> int:
    """Return the memory of all processes that have `token` in their environment (PSS, bytes).

    cpu_s: gets the processor seconds of each, by process id.
    """
    found = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # it has ended, or is not ours
            if token.encode() not in (process / "environ").read_bytes():
                continue
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            cpu_s[process.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for line in (process / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    found += 1024 * int(line.split()[1])
    return found


def cannot(way: str) -> str:
    """Return why a way cannot run here, or ""."""
    if way == "flower" and not (find_spec("flwr") and find_spec("ray")):
        return "flwr[simulation] is not installed"
    return ""


def measure(way: str, clients: int, rounds: int, *, data: Path, folder: Path) -> dict[str, Any]:
    """Run a way in processes of its own; return its figures."""
    token = uuid.uuid4().hex
    about = {
        "way": way,
        "clients": clients,
        "rounds": rounds,
        "data": str(data),
        "folder": str(folder),
    }
    environment = {
        **os.environ,
        TOKEN: token,
        TASK: json.dumps(about),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    begun, peak = time.time(), 0
    cpu_s: dict[str, float] = {}
    samples = [(begun, 0.0)]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import simulate_peers as it; it.run_here()"],
            env=environment,
            stdout=log,
            stderr=log,
        )
        while process.poll() is None:
            peak = max(peak, look(token, cpu_s))
            samples.append((time.time(), sum(cpu_s.values())))
            time.sleep(SAMPLE_S)
        wall_s = time.time() - begun
        if process.returncode:
            log.seek(0)
            raise click.ClickException(f"{way} failed:\n{log.read()[-4000:]}")
    marks = [float(line) for line in (folder / "marks").read_text().split()]
    each = [after - before for before, after in itertools.pairwise(marks)]
    used = np.diff(np.interp(marks, *np.transpose(samples)))
    return {
        "round_s": round(statistics.median(each[1:]), 3),
        "round_s_each": [round(one, 3) for one in each],
        "cpu_round_s": round(float(np.median(used[1:])), 3),
        "peak_mb": round(peak / 1e6),
        "accuracy": json.loads((folder / "result").read_text()),
        "wall_s": round(wall_s, 1),
    }


def run_here() -> None:
    """Run the way of this process's task, and leave the accuracy in its folder."""
    torch.set_num_threads(1)
    net = WAYS[task()["way"]]()
    Path(task()["folder"], "result").write_text(json.dumps(round(accuracy_of(net), 4)))


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), default=list(WAYS))
@click.option("--clients", default=100, show_default=True)
@click.option("--rounds", default=8, show_default=True, help="The first is not counted.")
@click.option("--repeats", default=3, show_default=True, help="Turns of all ways.")
@click.option("--smoke", is_flag=True, help="Tiny, to check that it works.")
def main(*, ways: tuple[str, ...], clients: int, rounds: int, repeats: int, smoke: bool) -> None:
    """Print one JSON row for each run."""
    if smoke:
        clients, rounds, repeats = 3, 3, 1
    with tempfile.TemporaryDirectory(prefix="simulate-peers-") as data:
        images = prepare(Path(data), clients)
        for repeat in range(repeats):
            plain_s = 0.0
            for way in ways:
                row: dict[str, Any] = {
                    "bench": "simulate_peers",
                    "way": way,
                    "repeat": repeat,
                    "clients": clients,
                    "rounds": rounds,
                    "images": images,
                    "load_1m": round(os.getloadavg()[0], 2),
                }
                if why := cannot(way):
                    print(json.dumps({**row, "skipped": why}), flush=True)
                    continue
                with tempfile.TemporaryDirectory(dir=data) as folder:
                    row |= measure(way, clients, rounds, data=Path(data), folder=Path(folder))
                plain_s = row["round_s"] if way == "plain" else plain_s
                row["over_plain"] = round(row["round_s"] / plain_s, 2) if plain_s else None
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""A rank of the tests of gangs: RANK, WORLD_SIZE and MASTER_PORT are set as torchrun sets them.

Arguments: the node's socket, a folder for results, how the model is spread, the optimizer, and
"evaluates", "sends" (every ten steps while the node asks for no pace) or "". It trains until
stopped, and writes what it did at which step.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.gang.link import Place
from fsl_async.nodes.client.gang_joining import RankSession

ROWS = 12
"""Of a global batch; 1, 2, 3 and 4 ranks have equal parts."""


def build(seed=0):
    """A model with rows that no number of ranks divides, one row, and a tied weight."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 31), nn.Tanh(), nn.Linear(31, 31), nn.Linear(31, 1))
    model.tied = model[2].weight
    return model


def part(step, rank, ranks):
    """The rows of one rank of the global batch of a step."""
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 16, generator=chance)
    rows = ROWS // ranks
    x = x[rank * rows : (rank + 1) * rows]
    return x, x.sin().sum(1, keepdim=True)


def loss_of(model, x, y):
    """Mean squared error."""
    return (model(x) - y).pow(2).mean()


def optimizer_of(name, model):
    """The inner optimizer."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def spread(model, how, ranks):
    """The model over the ranks."""
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "shard"))
        return fully_shard(model, mesh=mesh)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return model


def full(model):
    """The flat vector, float32, as `ModelWeights` orders it."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    values = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([one.detach().reshape(-1) for one in values]).numpy()


def main(socket, folder, how, optimizer_name, does):
    """Train as one rank."""
    evaluates, sends = does == "evaluates", does == "sends"
    place = Place.here()
    dist.init_process_group("gloo")
    session = RankSession(place, socket)
    session.orders.wait_until(lambda: session.orders.context is not None)
    training, log, exact = session.training, [], []
    config = {"sync": {"trigger": "buffer"}} if sends else {}
    context = ClientContext("c", rank=place.rank, ranks=place.world, config=config)
    fed = Fed(training, context)
    seed = place.rank if how == "ddp" else 0  # attach heals unequal replicas
    model = spread(build(seed), how, place.world)
    steps = 0
    training.on_version = lambda version: log.append((steps, "move", version))
    take = training.meter.take
    training.meter.take = lambda: (log.append((steps, "snapshot", 0)), take())[1]
    fed.attach(model)
    optimizer = optimizer_of(optimizer_name, model)
    going = True
    while going:
        loss = loss_of(model, *part(steps, place.rank, place.world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if evaluates and steps % 7 == 0:  # leaves the root of FSDP2 without its shards
            with torch.no_grad():
                model(torch.ones(1, 16))
        if evaluates and steps % 50 == 0:
            with fed.at_version() as version:
                exact.append((version, full(model)))
            if how != "ddp":
                model(torch.ones(1, 16)).sum().backward()
                optimizer.zero_grad()
        if sends and steps % 10 == 0 and not session.orders.pace_steps:
            fed.send()
        going = fed.step(tokens=ROWS // place.world, metrics={"loss": loss.item()})
    last = full(model)
    training.serve()
    session.close()
    out = Path(folder) / f"rank{place.rank}"
    np.savez(out, last=last, versions=[v for v, _ in exact], exact=[e for _, e in exact])
    out.with_suffix(".json").write_text(json.dumps({"log": log, "steps": steps}))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("FSL_GANG_CHECK_S", "0.01")
    main(*sys.argv[1:6])

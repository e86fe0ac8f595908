"""Peak memory of a split learning client, and of training the full model, against the planner's.

    python benchmarks/split_memory.py --method fsl-sage --set model.preset=0.5m --set train.batch=8

Each is measured in its own process: the highest resident memory of some steps without a network,
beyond a process that has trained a tiny model. Planned are weights, gradients, moments and what is
kept for the backward pass, without the temporary buffers of a pass.
"""

import argparse
import json
import os
import subprocess
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from fsl_async.config.load import load
from fsl_async.learn.data.facts import described, facts_of
from fsl_async.learn.split import build, task
from fsl_async.learn.split.build import shapes_of
from fsl_async.learn.split.task import open_samples
from fsl_async.plan.methods import PLANNED, trained
from fsl_async.process.memory import MemoryMark
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.methods.base import Activations, CutGradient, Position
from fsl_async.tools.demo.split import whole_memory

STEPS = 4


def client(overrides: list[str]) -> int:
    """Train a client's part for some steps; answers of the split server are replaced by zeros.

    Returns the bytes that it took.
    """
    torch.set_num_threads(1)
    config = described(load(None, overrides))
    task.warm_up()
    method = method_of(config.split)
    samples = open_samples(config, facts_of(config), (0, config.shards))
    parts = build.build_parts(config, at_client=True)
    half = build.client_part(
        method,
        parts.model,
        build.client_options(config, "a"),
        parts.auxiliary,
    )
    del parts
    for number, batch in zip(range(STEPS), samples.round(0), strict=False):
        steps, answer = method.local_step(half, batch, Position(0, number)), None
        while True:
            try:
                crossing = steps.send(answer)
            except StopIteration:
                break
            answer = None
            if isinstance(crossing, Activations) and crossing.wants_answer:
                answer = CutGradient(torch.zeros_like(crossing.smashed.values), 0.0, 0)
    return MemoryMark.grown()


def measured(kind: str, overrides: list[str]) -> int:
    """Bytes, in a process of its own."""
    argv = [sys.executable, __file__, f"--only={kind}", *(f"--set={each}" for each in overrides)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["grown"])


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fsl-sage")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--only", choices=["client", "whole"])
    options = parser.parse_args()
    if options.only:
        grown = {"client": client, "whole": whole_memory}[options.only](options.set)
        print(json.dumps({"grown": grown}))
        return
    overrides = [f"split.method={options.method}", *options.set]
    config = described(load(None, overrides))
    shapes, batch = shapes_of(config), config.train.batch
    memories = PLANNED[options.method].memory(shapes, batch), trained(shapes.whole, batch)
    planned = [memory.total for memory in memories]
    found = measured("client", overrides), measured("whole", overrides)
    row = {
        "client_mb": round(found[0] / 1e6, 1),
        "whole_mb": round(found[1] / 1e6, 1),
        "share": round(found[0] / found[1], 2),
        "planned_client_mb": round(planned[0] / 1e6, 1),
        "planned_whole_mb": round(planned[1] / 1e6, 1),
        "planned_share": round(planned[0] / planned[1], 2),
    }
    print(json.dumps({"method": options.method, "settings": options.set, **row}))


if __name__ == "__main__":
    main()

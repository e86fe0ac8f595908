"""Trains a run's whole model for a few steps and prints the memory that it took.

`demo split` runs it as a process and compares the memory of its clients with it.
"""

import json
import sys
from collections.abc import Sequence

import torch

from fsl_async.config.load import load
from fsl_async.learn.data.facts import facts_of
from fsl_async.learn.models.families import build_model
from fsl_async.learn.split.build import optimizer_of
from fsl_async.learn.split.smashed import cross_entropy
from fsl_async.learn.split.task import warm_up
from fsl_async.process.memory import MemoryMark

STEPS = 3


def main(overrides: Sequence[str]) -> None:
    """Print {"grown": bytes beyond those of the libraries}.

    overrides: the run's configuration, in the form of --set.
    """
    torch.set_num_threads(1)
    config = load(None, overrides)
    facts = facts_of(config)
    warm_up()
    model = build_model(config, facts)
    optimizer = optimizer_of(config).build(model.parameters())
    for _ in range(STEPS):
        size = config.train.batch
        if facts.language:
            inputs = torch.randint(0, facts.classes, (size, *facts.shape))
            labels = inputs.roll(-1, 1)
        else:
            inputs, labels = torch.rand(size, *facts.shape), torch.randint(facts.classes, (size,))
        loss = cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(json.dumps({"grown": MemoryMark.grown()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

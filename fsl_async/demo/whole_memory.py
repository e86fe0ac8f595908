"""Train the whole model for a few steps in this process and print what memory that took: `demo split` compares its clients with it."""

import json
import sys

import torch

from fsl_async.learn.gpt import GPT, PRESETS
from fsl_async.learn.split.task import warm_up
from fsl_async.observe.memory import Mark

STEPS = 3


def main(preset: str, batch: int) -> None:
    """Print {"grown": bytes beyond what the libraries take}."""
    torch.set_num_threads(1)
    sizes = PRESETS[preset]
    warm_up()
    model = GPT(sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        window = torch.randint(0, sizes.vocabulary, (batch, sizes.context + 1))
        loss = model.loss(window)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(json.dumps({"grown": Mark.grown()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

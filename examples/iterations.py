"""A flat loop by iterations with a schedule of its own: `python examples/iterations.py HOST:PORT`.

A small language model on the source of Python's argparse, with the loop that nanoGPT's train.py
has. Only the lines marked + are needed for a run; those marked ~ differ from a script for one
process.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import fsl_async

options = argparse.ArgumentParser()
options.add_argument("server")
options.add_argument("--max-iters", type=int, default=20_000)
arguments = options.parse_args()

batch_size, block_size, width = 8, 32, 48
learning_rate, warmup_iters = 3e-3, 50

fed = fsl_async.join(arguments.server)  # +
part, parts = fed.part  # +
torch.manual_seed(1337 + part)  # ~ or all clients would draw the same batches

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
train, held_out = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
train = train[part * len(train) // parts : (part + 1) * len(train) // parts]  # ~ this client's part


class Model(nn.Module):
    """One layer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss in nats a byte."""
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layer(self.bytes(inputs) + self.places.weight[:length], mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def get_batch(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows, and the same one byte later."""
    starts = torch.randint(len(data) - block_size - 1, (batch_size,))
    windows = torch.stack([data[start : start + block_size + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def get_lr(iteration: int) -> float:
    """Warm-up by this script's iterations, then a cosine over the run."""
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    done = fed.progress  # ~ None in a run without an end
    done = iteration / arguments.max_iters if done is None else done  # ~ was: this line alone
    return learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def eval_loss() -> float:
    """Held-out loss in nats a byte."""
    return sum(model(*get_batch(held_out)).item() for _ in range(20)) / 20


model = Model()
fed.attach(model)  # +
optimizer = torch.optim.AdamW(model.parameters())
iteration = 0
while iteration < arguments.max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    inputs, targets = get_batch(train)
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if not fed.step(tokens=inputs.numel(), metrics={"loss": loss}):  # +
        break  # +
fed.close()  # + waits until what was trained last has arrived
print(f"version {fed.version}: {iteration:,} iterations, held-out loss {eval_loss():.3f}")

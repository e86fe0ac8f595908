"""A loop over epochs and batches, as most scripts have: `python examples/epochs.py HOST:PORT`.

Only the lines marked + are needed for a run. The data are noisy pictures of ten patterns, made
here, the same at every client; each trains on its own part of them.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import fsl_async

EPOCHS, BATCH = 5_000, 64


def pictures(count: int, seed: int) -> TensorDataset:
    """Pictures of 8 x 8 pixels, and which of ten patterns each shows."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=drawn)
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 64, generator=drawn), labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of pictures that are recognized."""
    inputs, labels = data.tensors
    return (model(inputs).argmax(1) == labels).float().mean().item()


def main(server: str) -> None:
    """Train until the run ends, or these epochs do."""
    data, held_out = pictures(4096, seed=1), pictures(1024, seed=2)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fsl_async.join(server) as fed:  # +
        fed.attach(model)  # +
        part, parts = fed.part  # +
        mine = Subset(data, range(part, len(data), parts))  # +
        scheduler = fed.scheduler(optimizer)  # + rates follow the run's progress
        for epoch in range(EPOCHS):
            for inputs, labels in DataLoader(mine, batch_size=BATCH, shuffle=True):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()  # +
                if not fed.step(tokens=len(inputs), metrics={"loss": loss}):  # +
                    break  # +
            if not fed.running:  # + `break` has left the inner loop only
                break  # +
            if epoch % 50 == 0:
                print(f"epoch {epoch}: accuracy {accuracy(model, held_out):.3f}")
    print(f"version {fed.version}: accuracy {accuracy(model, held_out):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])

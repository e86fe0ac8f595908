"""A residual network with batch norm on images: `python examples/images.py HOST:PORT`.

Only the lines marked + are needed for a run. The images are shapes of random color, place and
size, made here.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import fsl_async

SIZE, BATCH, STEPS = 16, 32, 20_000


def images(count: int, drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares, disks, rings and crosses (labels 0 to 3) on noise, (count, 3, SIZE, SIZE)."""
    labels = torch.randint(4, (count,), generator=drawn)
    middle = SIZE / 2 + 4 * torch.rand(count, 2, 1, 1, generator=drawn) - 2
    radius = 4 + 2 * torch.rand(count, 1, 1, generator=drawn)
    grid = torch.arange(SIZE).float()
    across = (grid[None, None, :] - middle[:, 0]).abs()
    down = (grid[None, :, None] - middle[:, 1]).abs()
    away = (across**2 + down**2).sqrt()
    shapes = torch.stack(
        [
            torch.maximum(across, down) < radius,
            away < radius,
            (away - radius).abs() < 1.5,
            (torch.minimum(across, down) < 1.5) & (torch.maximum(across, down) < radius),
        ],
        dim=1,
    )
    shape = shapes[torch.arange(count), labels].float()[:, None]
    color = 0.5 + torch.rand(count, 3, 1, 1, generator=drawn)
    return shape * color + 0.3 * torch.randn(count, 3, SIZE, SIZE, generator=drawn), labels


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.around = nn.Conv2d(channels, wider, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Halve the size."""
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(inner)) + self.norms[2](self.around(x)))


def network() -> nn.Module:
    """A small ResNet."""
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)]
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, Block(8, 16), Block(16, 32), *ends)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of held-out images that are recognized, with the running statistics."""
    inputs, labels = images(512, torch.Generator().manual_seed(0))
    model.eval()
    found = (model(inputs).argmax(1) == labels).float().mean().item()
    model.train()
    return found


def main(server: str) -> None:
    """Train until the run ends, or these steps are done."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    with fsl_async.join(server) as fed:  # +
        fed.attach(model)  # +
        scheduler = fed.scheduler(optimizer)  # + instead of a MultiStepLR
        drawn = torch.Generator().manual_seed(1 + fed.part[0])  # + other images at each client
        for _ in range(STEPS):
            inputs, labels = images(BATCH, drawn)
            loss = functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()  # +
            if not fed.step(tokens=BATCH, metrics={"loss": loss}):  # +
                break  # +
    print(f"version {fed.version}: accuracy {accuracy(model):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])

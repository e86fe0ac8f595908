"""Networks for small images, as rows of named children that can be cut after any of them.

`resnet18` (He et al., arXiv:1512.03385) has the 7x7 stem and the names that torchvision uses, so
its weights fit. Cut after "layer2" it is the split that FSL-SAGE (Nair et al., arXiv:2505.23182)
was published with: 2,740,048 bytes at the client, 42,025,080 at the split server (10 classes, batch
norm's buffers and counters included), 128x4x4 values per 32x32 image.

`small_cnn` trains on a CPU: two convolutions, two linear layers, no batch norm. Cut it after
"pool1" or "pool2".
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from fsl_async.learn.models.forward import drawing


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution where size or width changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, width, H / stride, W / stride)."""
        across = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + across)


def resnet18(classes: int = 10, *, channels: int = 3, seed: int = 0) -> nn.Sequential:
    """ResNet-18: images float (N, channels, H, W) -> logits (N, classes)."""
    with drawing(torch.device("cpu"), seed, "model"):
        model = nn.Sequential()
        model.add_module("conv1", nn.Conv2d(channels, 64, 7, 2, 3, bias=False))
        model.add_module("bn1", nn.BatchNorm2d(64))
        model.add_module("relu", nn.ReLU())
        model.add_module("maxpool", nn.MaxPool2d(3, 2, 1))
        for number, width in enumerate((64, 128, 256, 512), start=1):
            inputs = width if number == 1 else width // 2
            stage = nn.Sequential(
                BasicBlock(inputs, width, 1 if number == 1 else 2), BasicBlock(width, width, 1)
            )
            model.add_module(f"layer{number}", stage)
        model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
        model.add_module("flatten", nn.Flatten())
        model.add_module("fc", nn.Linear(512, classes))
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return model


def small_cnn(
    classes: int = 10, *, channels: int = 3, side: int = 32, width: int = 16, seed: int = 0
) -> nn.Sequential:
    """Two convolutions and two linear layers.

    Images float (N, channels, side, side) -> logits (N, classes).
    """
    with drawing(torch.device("cpu"), seed, "model"):
        model = nn.Sequential()
        model.add_module("conv1", nn.Conv2d(channels, width, 3, padding=1))
        model.add_module("relu1", nn.ReLU())
        model.add_module("pool1", nn.MaxPool2d(2))
        model.add_module("conv2", nn.Conv2d(width, 2 * width, 3, padding=1))
        model.add_module("relu2", nn.ReLU())
        model.add_module("pool2", nn.MaxPool2d(2))
        model.add_module("flatten", nn.Flatten())
        model.add_module("fc1", nn.Linear(2 * width * (side // 4) ** 2, 4 * width))
        model.add_module("relu3", nn.ReLU())
        model.add_module("fc2", nn.Linear(4 * width, classes))
    return model

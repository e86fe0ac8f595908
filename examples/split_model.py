r"""Your own model for split learning, and your own auxiliary model for the methods that need one.

    bin/fsl-node --role server --with-ps --data IMAGES \
        --model examples/split_model.py:net --auxiliary examples/split_model.py:small \
        --set split.method=fsl-sage --set split.cut=stage1 --set sync.clients=2 127.0.0.1:7100
    bin/fsl-node --role client --name site-a --data IMAGES \
        --model examples/split_model.py:net --auxiliary examples/split_model.py:small \
        127.0.0.1:7100

IMAGES: a CIFAR folder (binary version), MNIST's files or an .npz archive. Each node runs its own
copy of this file; the run refuses a client with a copy that builds other shapes. The cut is after
the child that split.cut names; by default after the first one with weights.
"""

from torch import nn


def stage(inputs, width):
    """Halve the height and the width of the image."""
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, stride=2, padding=1), nn.GroupNorm(4, width), nn.ReLU()
    )


def net(shape, classes):
    """Build the model; any nn.Sequential is allowed.

    shape: of one sample, (channels, height, width) for images. Weights may be random as usual: the
    seed is the run's.
    """
    model = nn.Sequential()
    model.add_module("stage1", stage(shape[0], 16))
    model.add_module("stage2", stage(16, 32))
    model.add_module("stage3", stage(32, 64))
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(64, classes))
    return model


def small(shape, outputs):
    """Build the auxiliary model, which stands in for the split server's part at a client.

    shape: of one sample's activations at the cut. outputs: number of classes.
    """
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, outputs),
    )

"""Sizes of the built-in models, by name, for nodes that do not import torch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen
class Sizes:
    """Sizes of a GPT.

    layers: transformer blocks. width: of the residual stream. heads: attention heads.
    context: bytes in a window.
    """

    layers: int
    width: int
    heads: int
    context: int


DECAY_SHARES: Mapping[str, float] = {"muon": 0.5, "adamw": 0.3}
"""Last part of a run in which rates fall, by inner optimizer (docs/adr/0107)."""

# Parameters: 12 layers width^2 + 256 width, plus those of the norms.
SIZES: Mapping[str, Sizes] = {
    "0.5m": Sizes(layers=4, width=96, heads=4, context=128),
    "1m": Sizes(layers=5, width=128, heads=4, context=256),
    "3m": Sizes(layers=7, width=192, heads=6, context=256),
    "10m": Sizes(layers=6, width=384, heads=6, context=512),
    "50m": Sizes(layers=10, width=640, heads=10, context=1024),
    "124m": Sizes(layers=13, width=896, heads=14, context=1024),
    "350m": Sizes(layers=28, width=1024, heads=16, context=2048),
    "1b": Sizes(layers=20, width=2048, heads=16, context=2048),
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "published-fsl-sage": {
        "split.method": "fsl-sage",
        "split.cut": "layer2",
        "split.auxiliary": "blocks:1",
        "split.optimizer": "adam",
        "split.betas": "0.9,0.999",
        "split.samples": 0,
        "split.upload_every": 5,
        "split.align_every": 10,
        "split.align_passes": 100,
        "split.align_batch": 1000,
        "split.align_rate": 1e-3,
        "split.buffer_samples": 1000,
        "split.up": "fp32",
        "split.down": "fp32",
        "model.family": "resnet18",
        "data.flip": True,
        "data.crop": 4,
        "train.batch": 256,
        "train.learning_rate": 1e-3,
        "train.weight_decay": 1e-4,
    },
}
"""`split.preset`: settings of a published run, by dotted key.

Those of FSL-SAGE are of its experiments with ResNet-18 on CIFAR (arXiv:2505.23182). Clients, their
shares of the data and rounds are the run's own.
"""

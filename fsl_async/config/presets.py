"""Sizes of the built-in models, by name, for nodes that do not import torch. Pure."""

from __future__ import annotations

from collections.abc import Mapping

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

"""Categories and directions of bytes. Pure."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    """What bytes carry; a run's ledger has the same names."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    LABELS = "labels"
    AUXILIARY = "auxiliary"
    CLIENT_MODEL = "client model"
    FULL_MODEL = "full model"
    ADAPTERS = "adapters"
    SCALARS = "scalars"


class Direction(StrEnum):
    """From (up) or to (down) the client."""

    UP = "up"
    DOWN = "down"

"""What bytes are for, and which way they go. Pure."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    """What bytes are for; the ledger of a run has the same names."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    LABELS = "labels"
    AUXILIARY = "auxiliary"
    CLIENT_MODEL = "client model"
    FULL_MODEL = "full model"


class Direction(StrEnum):
    """Seen from the client."""

    UP = "up"
    DOWN = "down"

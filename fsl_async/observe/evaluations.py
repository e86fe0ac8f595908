"""Held-out losses of versions: reported by a client, or left by `fsl-node evaluate`. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import frozen

EVALUATIONS = "evaluations.jsonl"
SHOWN = 200
"""The newest ones that are shown and given out."""
_MAX_BYTES = 16 << 20


@frozen
class Evaluation:
    """The loss of a version in nats a token. of: "weights", or "mean" of late versions."""

    version: int
    loss: float
    of: str = "weights"
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(min(self.loss, 700.0))


def kept(run_dir: Path) -> list[Evaluation]:
    """The evaluations that the command left in a run directory; other lines are skipped."""
    try:
        with (run_dir / EVALUATIONS).open("rb") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row: Any = json.loads(line)
            bits = row.get("bits_per_byte")
            found.append(
                Evaluation(
                    int(row["version"]),
                    float(row["loss"]),
                    str(row["of"]),
                    None if bits is None else float(bits),
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def newest(*sources: Iterable[Evaluation]) -> list[Evaluation]:
    """The newest evaluations of all sources by version; a later source counts for a version."""
    by_version: dict[tuple[int, str], Evaluation] = {}
    for source in sources:
        for one in source:
            by_version[one.version, one.of] = one
    return [by_version[key] for key in sorted(by_version)][-SHOWN:]


def line_of(evaluations: list[Evaluation]) -> str:
    """One line for people: the newest loss, and the lowest of the versions' own weights."""
    last = evaluations[-1]
    of = "" if last.of == "weights" else f", of the {last.of} of late versions"
    bits = f", {last.bits_per_byte:.3f} bits a byte" if last.bits_per_byte is not None else ""
    text = (
        f"held-out loss {last.loss:.4f} nats a token (perplexity {last.perplexity:.4g}{bits})"
        f" at version {last.version}{of}"
    )
    best = min(evaluations, key=lambda one: one.loss)
    if best.version != last.version:
        text += f"; lowest {best.loss:.4f} at {best.version}"
    return text

"""Held-out losses of versions: reported by a client, or left by `fsl-node evaluate`. Pure."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import frozen

from fsl_async.errors import printable
from fsl_async.roles.phrasing import figure

EVALUATIONS = "evaluations.jsonl"
MOST_CHARACTERS = 200
SHOWN = 200
"""The newest ones that are shown and given out."""
_MAX_BYTES = 16 << 20


@frozen
class Evaluation:
    """The loss of a version in nats a token. of: "weights", or "mean" of late versions.

    data: what it was evaluated on; empty: on a client's held-out data, by the client.
    """

    version: int
    loss: float
    of: str = "weights"
    bits_per_byte: float | None = None
    data: str = ""
    accuracy: float | None = None
    """Where the loss is of labels or preferences, not of tokens: the share that is right."""

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
            bits, accuracy = row.get("bits_per_byte"), row.get("accuracy")
            one = Evaluation(
                int(row["version"]),
                float(row["loss"]),
                str(row["of"]),
                None if bits is None else float(bits),
                printable(str(row.get("data", "")))[:MOST_CHARACTERS],
                None if accuracy is None else float(accuracy),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
        if math.isfinite(one.loss):
            found.append(one)
    return found


def newest(version: int, *sources: Iterable[Evaluation]) -> list[Evaluation]:
    """The newest evaluations of all sources, up to `version`, those on one data together.

    Of several of one version on the same data the last counts. After a rollback, those of versions
    that are no more are left out.
    """
    found: dict[tuple[int, str, str], Evaluation] = {}
    for source in sources:
        for one in source:
            if one.version <= version:
                found[one.version, one.data, one.of] = one
    return [found[key] for key in sorted(found)][-SHOWN:]


def line_of(evaluations: list[Evaluation]) -> str:
    """One line for people: the newest loss, and the lowest on the same data."""
    last = max(evaluations, key=lambda one: (one.version, one.of == "weights"))
    of = "" if last.of == "weights" else f", of the {last.of} of late versions"
    on = f" on {last.data}" if last.data else ""
    bits = f", {figure(last.bits_per_byte)} bits a byte" if last.bits_per_byte is not None else ""
    if last.accuracy is None:
        unit = f"nats a token (perplexity {last.perplexity:.4g}{bits})"
    else:
        unit = f"(accuracy {last.accuracy:.1%})".replace("%", " %")
    text = f"held-out loss{on} {figure(last.loss, 4)} {unit} at version {last.version}{of}"
    alike = [one for one in evaluations if (one.data, one.of) == (last.data, last.of)]
    best = min(alike, key=lambda one: one.loss)
    if best.version != last.version:
        text += f"; lowest {figure(best.loss, 4)} at {best.version}"
    return text

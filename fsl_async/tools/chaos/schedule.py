"""Draws the time, kind, victim and duration of faults. Pure: one seed is always the same storm.

Times between faults are exponential, as of independent failures. Kind and victim are uniform. The
duration is uniform between two bounds; a kill has none, because its launcher decides when the
process is back.

The log of a storm, RUN/chaos.jsonl: each fault, its process and its time.

A line is written and synced before the action. Times `t` are wall clock, as in the run's journals.

    {"t": 1763722149.3, "what": "storm", "faults_per_hour": 125.0, "kinds": [...], "seed": 1,
        "seconds": 300.0, "clients": [...]}
    {"t": ..., "what": "begin", "fault": 7, "kind": "stop", "name": "client-2", "pid": 4711,
        "lasts_s": 8.1}
    {"t": ..., "what": "end", "fault": 7, "kind": "stop", "name": "client-2"}
    {"t": ..., "what": "missed", "fault": 8, "kind": "kill"}    no process could be hit
    {"t": ..., "what": "over"}

A kill ends when it begins. A "missed" follows a "begin" that failed. A line that a crash or a full
disk has cut short is ended by the next write, and `JournalReader` skips it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen, validators

from fsl_async.files.private_files import FILE_MODE

KILL, STOP, PARTITION, SLOW = KINDS = ("kill", "stop", "partition", "slow")
HOUR_S = 3600.0


@frozen
class Fault:
    """One fault: `at_s` seconds after the start, for `lasts_s`.

    share: in [0, 1), picks the victim among the possible ones.
    """

    at_s: float
    kind: str
    lasts_s: float
    share: float

    def victim(self, names: Sequence[str]) -> str | None:
        """The name of the process to hit; None when `names` is empty."""
        return names[int(self.share * len(names))] if names else None


@frozen
class Storm:
    """The parameters of a storm. away_s: shortest and longest duration of a fault."""

    faults_per_hour: float = field(validator=validators.gt(0.0))
    kinds: tuple[str, ...] = field(validator=validators.min_len(1))
    seed: int = 0
    away_s: tuple[float, float] = (2.0, 20.0)

    def faults(self, seconds: float) -> Iterator[Fault]:
        """The faults of the first `seconds`, in order; lazily, because a storm may be long."""
        rng = random.Random(f"chaos/{self.seed}")  # noqa: S311 - not for secrets
        at = rng.expovariate(self.faults_per_hour / HOUR_S)
        while at < seconds:
            kind = self.kinds[int(rng.random() * len(self.kinds))]
            lasts = rng.uniform(*self.away_s)
            yield Fault(at, kind, 0.0 if kind == KILL else lasts, rng.random())
            at += rng.expovariate(self.faults_per_hour / HOUR_S)


FILE = "chaos.jsonl"


class FaultLog:
    """Appends lines to a log."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE
        )
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, what: str, **facts: Any) -> None:
        """Write a line and sync it. On OSError the caller must not do what the line logs."""
        line = json.dumps({"t": round(time.time(), 4), "what": what, **facts}) + "\n"
        data = b"\n" * self._torn + line.encode()
        self._torn = True
        while data:  # a disk that becomes full may write a part without an error
            data = data[os.write(self._descriptor, data) :]
        self._torn = False
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

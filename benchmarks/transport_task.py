"""The task of one end of a measured transfer, and its counts.

An end is a process, started with its task as JSON. The receiver listens (with `down`, the dialer
receives), prints `{"port": ...}`, counts the payload that arrives and, `warm_s` + `measure_s` after
its first byte, prints what it counted and ends. The sender sends chunks until it is ended.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cattrs
from attrs import frozen

START_S = 20.0
"""How long a process may take to begin."""
GRAIN_S = 0.005
"""Arrivals are noted no more often than this."""


@frozen
class Task:
    """The task of a process. `stripes` 0: chosen by measurement. `keys`: CURVE's public and secret
    key of the listener.
    """

    way: str
    sends: bool
    address: str
    port: int = 0
    chunk_bytes: int = 1 << 20
    stripes: int = 1
    down: bool = False
    """The listener sends, not the dialer; fsl only."""
    keys: tuple[str, str] | None = None
    warm_s: float = 0.5
    measure_s: float = 2.0
    pings: bool = True
    """Control messages beside the chunks, whose delay is measured; fsl only."""

    @property
    def limit_s(self) -> float:
        """How long its result may take: over a slow path the first chunk may be late."""
        return 3 * (self.warm_s + self.measure_s) + 3 * START_S

    def command(self, program: Sequence[str], python: str = sys.executable) -> list[str]:
        """Words that run it: `program` are the interpreter's arguments."""
        return [python, *program, json.dumps(cattrs.unstructure(self))]


def task_of(text: str) -> Task:
    """The task that a process was started with."""
    return cattrs.structure(json.loads(text), Task)


def end_with_input() -> None:
    """End this process when its standard input ends.

    That is when the process that started it ends, on this machine or, by ssh, on another.
    """

    def wait() -> None:
        while os.read(0, 1 << 10):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="input", daemon=True).start()


def say(**found: Any) -> None:
    """Print one line for the process that started this one."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


class Meter:
    """Payload that arrived, over time."""

    def __init__(self, task: Task, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._warm_s = task.warm_s
        self._measure_s = task.measure_s
        self._total = 0
        self._first = 0.0
        self._noted: list[tuple[float, int]] = []
        self._cpu_at_warm = 0.0

    def add(self, size: int) -> bool:
        """Count a payload; True when the time is over."""
        now = self._clock()
        self._total += size
        if not self._noted:
            self._first = now
        elif now < self._noted[-1][0] + GRAIN_S:
            return False
        self._noted.append((now, self._total))
        if self._cpu_at_warm == 0.0 and now >= self._first + self._warm_s:
            self._cpu_at_warm = _cpu_s()
        return now >= self._first + self._warm_s + self._measure_s

    def result(self) -> dict[str, Any]:
        """Bytes and seconds after the warm-up and from the first byte on.

        Also the longest silence in the measured part, and its processor seconds.
        """
        first_at, first_bytes = self._noted[0]
        later = [note for note in self._noted if note[0] >= self._first + self._warm_s]
        begin_at, begin_bytes = later[0] if later else self._noted[-1]
        end_at, end_bytes = self._noted[-1]
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(later)]
        return {
            "bytes": end_bytes - begin_bytes,
            "seconds": end_at - begin_at,
            "whole_bytes": end_bytes - first_bytes,
            "whole_seconds": end_at - first_at,
            "longest_gap_s": max(gaps, default=0.0),
            "cpu_s": _cpu_s() - self._cpu_at_warm,
        }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

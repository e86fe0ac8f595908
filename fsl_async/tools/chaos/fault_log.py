"""The log of a storm, RUN/chaos.jsonl: each fault, its process and its time.

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
import time
from pathlib import Path
from typing import Any

from fsl_async.files.files import FILE_MODE

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

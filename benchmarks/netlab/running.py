"""Programs that run beside this one and print lines."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence

from fsl_async.errors import FslError


class Running:
    """A program that runs; its lines come one by one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._rest = b""

    def line(self, limit_s: float) -> str:
        """The next line of its output; raises FslError when none comes in time."""
        assert self.process.stdout is not None
        file = self.process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(file, 1 << 16) if ready else b""
            if not data:
                raise FslError(f"{self.process.args!r:.200} printed nothing within {limit_s:g} s")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@contextlib.contextmanager
def running(argv: Sequence[str]) -> Iterator[Running]:
    """Start a program and end it with the block; its standard input ends then, too."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Running(process)
        finally:
            process.kill()

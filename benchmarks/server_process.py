"""A parameter server as users start it, `fsl-node --role ps`, in a process of its own, seen from
outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define


@define
class Server:
    """The process. `start_bytes` is its VmRSS when it said that it listens."""

    process: subprocess.Popen[str]
    address: str
    start_bytes: int = 0

    def memory_bytes(self, name: str) -> int:
        """VmRSS (now) or VmHWM (the most so far)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"no {name} of the server: it has ended")

    def cpu_s(self) -> float:
        """Seconds of processor time so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Server]:
    """Start a server on a free port of loopback, give it out once it listens, end it.

    settings: dotted names as for --set. What it says goes to server.log beside `run_dir`.
    """
    script = Path(sys.executable).with_name("fsl-node")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "fsl_async.cli"]
    sets = [
        part
        for name, value in settings.items()
        for part in ("--set", f"{name}={json.dumps(value)}")
    ]
    log = run_dir.parent / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*program, "--role", "ps", "--json", "--run-dir", str(run_dir), *sets, "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        said = json.loads(process.stdout.readline() or "{}")
        if said.get("event") != "listening":
            raise RuntimeError(log.read_text() or f"the server said {said}")
        server = Server(process, said["address"])
        server.start_bytes = server.memory_bytes("VmRSS")
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

"""A parameter server as users start it, `fsl-node --role ps`, in its own process."""

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
    """The process. `start_bytes` is its VmRSS when it reported that it listens."""

    process: subprocess.Popen[str]
    address: str
    start_bytes: int = 0

    def memory_bytes(self, name: str) -> int:
        """VmRSS (now) or VmHWM (the peak so far)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"no {name} of the parameter server: it has ended")

    def cpu_s(self) -> float:
        """Seconds of processor time so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Server]:
    """Start a parameter server on a free port of loopback, yield it once it listens, end it.

    settings: dotted names as for --set. Its output goes to server.log beside `run_dir`.
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
        reported = json.loads(process.stdout.readline() or "{}")
        if reported.get("event") != "listening":
            raise RuntimeError(log.read_text() or f"the parameter server reported {reported}")
        server = Server(process, reported["address"])
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

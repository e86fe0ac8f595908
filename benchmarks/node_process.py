"""Nodes as users start them, `fsl-node`, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from attrs import define, field

if TYPE_CHECKING:
    from netlab.laboratory import Laboratory

NODE = (sys.executable, "-P", "-m", "fsl_async.cli")
LIMIT_S = 300.0


def sets_of(settings: Mapping[str, Any]) -> list[str]:
    """Words for the command line; settings have dotted names as for --set."""
    pairs = [("--set", f"{name}={json.dumps(value)}") for name, value in settings.items()]
    return [word for pair in pairs for word in pair]


@define
class Nodes:
    """Processes by name, whose output goes to NAME.log in a folder. Leaving the block kills them.

    lab: with it each runs in the site of its name, or in another one, without keys.
    """

    folder: Path
    lab: Laboratory | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def start(self, name: str, *words: object, site: str = "", **env: object) -> None:
        """Start a node, or start it again."""
        argv = [*NODE, *map(str, words)]
        if self.lab is not None:
            argv = list(self.lab.command(site or name, [*argv, "--insecure"]))
        more = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv,
                cwd=self.folder,
                env={**os.environ, **{key: str(value) for key, value in more.items()}},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def text(self, name: str) -> str:
        """A node's output so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def line(self, name: str, words: str, times: int = 1) -> str:
        """Wait until a node's output has `words` in so many lines; return the last of these."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = self.ended()
            lines = [line for line in self.text(name).splitlines() if words in line]
            if len(lines) >= times:
                return lines[times - 1]
            if ended or time.monotonic() > deadline:
                raise SystemExit(f"{words!r} never came:\n{ended or self.text(name)[-4000:]}")
            time.sleep(0.05)

    def address(self, name: str) -> str:
        """The address that a node started with --json listens at."""
        return str(json.loads(self.line(name, '"listening"'))["address"])

    def ended(self) -> str:
        """The last output of nodes that have ended."""
        ended = [name for name, one in self.processes.items() if one.poll() is not None]
        return "\n".join(f"{name}: {self.text(name)[-600:]}" for name in ended)

    def interrupt(self, *names: str) -> None:
        """Interrupt these nodes, or all, and wait for all; kill those that go on."""
        for name in names or self.processes:
            if self.processes[name].poll() is None:
                self.processes[name].send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@define
class Server:
    """A server's process. `start_bytes` is its VmRSS when it reported that it listens."""

    process: subprocess.Popen[str]
    address: str
    start_bytes: int = 0

    def memory_bytes(self, name: str) -> int:
        """VmRSS (now) or VmHWM (the peak so far)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"no {name} of the server: it has ended")

    def cpu_s(self) -> float:
        """Seconds of processor time so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(
    run_dir: Path, settings: Mapping[str, Any], role: str = "ps", listen: str = "127.0.0.1:0"
) -> Iterator[Server]:
    """Start a server on a free port of loopback, yield it once it listens, end it.

    Its errors go to server.log beside `run_dir`.
    """
    words = ["--role", role, "--json", "--run-dir", str(run_dir), *sets_of(settings)]
    log = run_dir.parent / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*NODE, *words, *filter(None, [listen])],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        line = next((one for one in process.stdout if '"listening"' in one), "")
        if not line:
            raise RuntimeError(log.read_text() or "the server reported nothing")
        server = Server(process, json.loads(line)["address"])
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

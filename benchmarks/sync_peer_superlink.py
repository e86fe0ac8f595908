"""Flower's deployment as its documentation starts it, for benchmarks/sync_peers.py.

A SuperLink, which starts the server app (benchmarks/sync_peer_app.py) in a process of its own, and
a SuperNode for each client, which starts a process of the client app for every message.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import Factory, define
from sync_peer_ends import FLOWER_LIMIT_BYTES

APP = Path(__file__).with_name("sync_peer_app.py")
POLL_S = 0.1
BEGUN = 19
"""Place of the time at which a process began, among the fields of `stat_of`."""

END_S = 10.0
PATIENCE_S = 60.0
MESSAGE_FRAME_BYTES = 4096
"""More than Flower's fields around the array take."""

FLOWER_MODELS = {"flower": (22, 4), "flower-superlink": (16, 18)}
"""Peak memory of Flower 1.42 in models (all processes): for each client, its share of the server
included, and beyond. A row that does not fit is skipped, because other jobs would be killed too."""

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "syncpeer"
version = "1.0.0"
description = "A round without training"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "local"
[tool.flwr.app.components]
serverapp = "syncpeer.{app}:server"
clientapp = "syncpeer.{app}:client"
[tool.flwr.app.config]
parameters = {parameters}
clients = {clients}
rounds = {rounds}
out = "{out}"
"""
_CONNECTION = """\
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


def is_listening(port: int) -> bool:
    """Whether a connection to that port of loopback is accepted."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def stat_of(process: int) -> list[str]:
    """The fields of a process in /proc from its state on; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []


def tree(root: int) -> list[int]:
    """A process and all below it: what Flower starts may be in a session of its own."""
    numbers = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    parents = {number: int(stat[1]) for number in numbers if (stat := stat_of(number))}
    found = [root]
    for process in found:  # grows
        found += [child for child, parent in parents.items() if parent == process]
    return found


def memory_bytes(processes: Iterable[int], name: str = "VmHWM") -> int:
    """VmHWM (or VmRSS) of these processes, added."""
    found = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith(name):
                    found += 1024 * int(line.split()[1])
    return found


@define
class Deployment:
    """The SuperLink, which is the first, and the SuperNodes."""

    bin_folder: Path
    folder: Path
    running: list[subprocess.Popen[bytes]] = Factory(list)

    def environment(self) -> dict[str, str]:
        """Variables of all processes. Flower looks its programs up in PATH."""
        return {
            **os.environ,
            "PATH": f"{self.bin_folder}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program of Flower's in the background."""
        with (self.folder / f"flower-{len(self.running)}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(self.bin_folder / program), *arguments],
                stdout=log,
                stderr=log,
                env=self.environment(),
            )
        self.running.append(process)
        return process

    def wait(self, deadline: float) -> None:
        """Wait a moment. Raises if one has ended or the time is over."""
        time.sleep(POLL_S)
        late = time.monotonic() > deadline
        for index, process in enumerate(self.running):
            if late or process.poll() is not None:
                log = (self.folder / f"flower-{index}.log").read_text(errors="replace")
                reason = "not done in time" if late else f"exit status {process.returncode}"
                raise RuntimeError(f"{reason}\n{log[-4000:]}")

    def close(self) -> None:
        """End all, and what they have started."""
        below = [number for one in self.running for number in tree(one.pid)]
        begun = {number: stat[BEGUN] for number in below if (stat := stat_of(number))}
        for process in self.running:
            process.terminate()
        limit = time.monotonic() + END_S
        while time.monotonic() < limit and any(process.poll() is None for process in self.running):
            time.sleep(POLL_S)
        for number, when in begun.items():
            if stat_of(number)[BEGUN : BEGUN + 1] == [when]:  # and not another process by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        for process in self.running:
            process.wait()


@contextlib.contextmanager
def deployed(bin_folder: Path, folder: Path) -> Iterator[Deployment]:
    """An empty deployment, which ends with the context."""
    deployment = Deployment(bin_folder, folder)
    try:
        yield deployment
    finally:
        deployment.close()


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def cannot(peer: str, model_bytes: int, clients: int, python: str, folder: Path) -> str:
    """Why a row of `flower` or `flower-superlink` cannot be measured, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="sync-peers-", dir=folder) as home:
        done = subprocess.run(
            [python, "-c", "import flwr, numpy"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": home},
        )
    if done.returncode:
        return (done.stderr.strip() or f"{python} has no flwr").splitlines()[-1]
    if peer == "flower" and model_bytes + MESSAGE_FRAME_BYTES > FLOWER_LIMIT_BYTES:
        return f"{model_bytes} bytes are more than a message of {FLOWER_LIMIT_BYTES} bytes holds"
    each, beyond = FLOWER_MODELS[peer]
    needed, free = model_bytes * (each * clients + beyond), available_bytes()
    if needed > free:
        return f"needs about {needed / 1e9:.0f} GB of memory; {free / 1e9:.0f} GB are available"
    return ""


def measure(
    task: Mapping[str, int], ports: list[int], python: str, folder: Path, deadline: float
) -> dict[str, Any]:
    """Run all rounds; `task` has the parameters, clients and rounds. Returns the app's figures.

    start_bytes and peak_bytes are those of SuperLink and server app together, all_bytes is the most
    that all processes had at a time.
    """
    package, out = folder / "app" / "syncpeer", folder / "found.json"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(APP, package)
    (folder / "app" / "pyproject.toml").write_text(_PROJECT.format(app=APP.stem, out=out, **task))
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(_CONNECTION.format(port=ports[0]))
    bin_folder = Path(python).absolute().parent
    with deployed(bin_folder, folder) as deployment:
        link = deployment.start(
            "flower-superlink", "--insecure", "--port", str(ports[0]),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        while not is_listening(ports[0]):
            deployment.wait(deadline)
        start_bytes = memory_bytes([link.pid], "VmRSS")
        for index, port in enumerate(ports[1:]):
            deployment.start(
                "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{ports[0]}",
                "--port", str(port), "--node-config", f"index={index}",
            )  # fmt: skip
        subprocess.run(
            [str(bin_folder / "flwr"), "run", str(folder / "app"), "here"],
            capture_output=True,
            check=True,
            timeout=PATIENCE_S,
            env=deployment.environment(),
        )
        link_bytes = all_bytes = 0
        while not out.exists():
            deployment.wait(deadline)
            link_bytes = max(link_bytes, memory_bytes([link.pid]))
            everyone = [process for one in deployment.running for process in tree(one.pid)]
            all_bytes = max(all_bytes, memory_bytes(everyone))
        found: dict[str, Any] = json.loads(out.read_text())
        link_bytes = max(link_bytes, memory_bytes([link.pid]))
    found["start_bytes"] += start_bytes
    found["peak_bytes"] += link_bytes
    mean = (task["clients"] - 1) / 2 + task["rounds"]
    if abs(found["mean"] - mean) > 1e-4:
        raise RuntimeError(f"the mean of the clients is {found['mean']}, not {mean}")
    return {**found, "all_bytes": all_bytes}

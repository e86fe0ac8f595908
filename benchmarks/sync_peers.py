"""Other ways to bring K clients to one model, beside benchmarks/sync.py: gloo, Flower, a bare copy.

    python benchmarks/sync_peers.py
        25 M and 100 M parameters, 1 and 6 clients, all peers
    python benchmarks/sync_peers.py --peer flower --flower-python VENV/bin/python

A row is the median over --rounds syncs after one that warms up. Every client, rank and server is a
process of its own (benchmarks/sync_peer_ends.py), on loopback, one thread each for NumPy and torch:

    gloo    torch.distributed's all-reduce of one fp32 vector: no server, nothing durable, and all
            ranks must be there. sync_s is between two barriers, on the slowest rank. Bytes are
            those of a ring: 2 (K - 1) / K vectors each way.
    flower  a Flower server and NumPy clients over its gRPC (`start_server` and `start_client`,
            which Flower keeps for compatibility: model and result are one message each). FedAvg of
            one fp32 array; a client returns a constant array at once. A round begins with the model
            on its way to the clients and ends with their mean in the server's memory: nothing is
            durable. Bytes are those of the serialized array.
    copy    the least that a server must do to be durable: --coded-bits a value from each client
            into a file of its own with fsync; when all are durable, as many bytes back to each.
            Plain sockets, a thread for each client, buffers of 1 MiB. Nothing is decoded or added.
            sync_s is from the first client's first byte to the last client's last one.

Memory is the server's VmHWM at the end minus its VmRSS before it had a model, divided by the fp32
size of the model (null where there is no server). memory_all_mb adds the VmHWM of all processes, so
that pages they share count several times. The
machine's limits are measured just before a row (benchmarks/limits.py).
A row with `skipped` says why there are no figures.

Flower is no dependency of this project, and brings a web framework and a database of its own:
    python -m venv VENV && VENV/bin/pip install flwr
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

import click
import limits
from attrs import define, evolve, field
from sync_peer_ends import FLOWER_LIMIT_BYTES

from fsl_async.store.vectors.memory import available_bytes

TIMEOUT_S = 600.0
POLL_S = 0.02
SCRIPT = Path(__file__).with_name("sync_peer_ends.py")
MESSAGE_FRAME_BYTES = 4096
"""More than Flower's fields around the array take."""
FLOWER_EACH, FLOWER_BEYOND = 22, 4
"""Models in memory at Flower 1.42's peak, all processes: for each client, and beyond.

A row that does not fit is skipped: otherwise the system would kill processes.
"""


@define
class Size:
    """What a row is about. `rounds` includes the one that warms up."""

    clients: int
    parameters: int
    rounds: int
    coded_bits: float
    flower_python: str
    folder: Path

    @property
    def coded_bytes(self) -> int:
        """Bytes of a coded delta or update."""
        return max(1, round(self.parameters * self.coded_bits / 8))


# --- processes ----------------------------------------------------------------------------------


@define
class Ends:
    """The processes of one row. Leaving the context kills those that still run."""

    size: Size
    folder: Path
    deadline: float = field(factory=lambda: time.monotonic() + TIMEOUT_S)
    running: list[subprocess.Popen[str]] = field(factory=list)
    logs: list[IO[str]] = field(factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for log in self.logs:
            log.close()

    def start(self, end: str, python: str = sys.executable, **more: Any) -> subprocess.Popen[str]:
        """Start a process."""
        task = {
            "end": end,
            "clients": self.size.clients,
            "parameters": self.size.parameters,
            "rounds": self.size.rounds,
            "folder": str(self.folder),
            "timeout_s": TIMEOUT_S,
            **more,
        }
        log = (self.folder / f"log-{len(self.logs)}").open("w+")
        self.logs.append(log)
        process = subprocess.Popen(
            [python, str(SCRIPT), json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_HOME": str(self.folder),
            },
        )
        self.running.append(process)
        return process

    def results(self) -> list[dict[str, Any]]:
        """Wait for all and return what each has measured, in the order of their start."""
        while any(process.poll() is None for process in self.running):
            self.check()
            time.sleep(POLL_S)
        self.check()
        found = []
        for process in self.running:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.read().splitlines()[-1]))
        return found

    def check(self) -> None:
        """Raise if one has failed or the time is over: the others would wait for it."""
        for process, log in zip(self.running, self.logs, strict=True):
            if process.poll():
                log.seek(0)
                raise RuntimeError(f"exit status {process.returncode}\n{log.read()[-4000:]}")
        if time.monotonic() > self.deadline:
            raise RuntimeError(f"not done within {TIMEOUT_S:g} s")

    def wait_until_listening(self, port: int) -> None:
        """Wait until a connection to that port is accepted."""
        while True:
            self.check()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(POLL_S)


def free_port() -> int:
    """A port that was free a moment ago, for a server that cannot report its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- peers --------------------------------------------------------------------------------------


def row_of(
    ends: list[dict[str, Any]], seconds: list[float], up: float, down: float, *, server: bool
) -> dict[str, Any]:
    """The figures of a row; the server, where there is one, is the first of `ends`."""
    counted = seconds[1:]
    row: dict[str, Any] = {
        "sync_s": round(statistics.median(counted), 3),
        "sync_s_each": [round(one, 3) for one in counted],
        "bytes_up": round(up),
        "bytes_down": round(down),
        "server_peak_mb": round(ends[0]["peak_bytes"] / 1e6, 1) if server else None,
        "server_grown_bytes": ends[0]["peak_bytes"] - ends[0]["start_bytes"] if server else None,
        "memory_all_mb": round(sum(end["peak_bytes"] for end in ends) / 1e6, 1),
    }
    if "version" in ends[0]:
        row["version"] = ends[0]["version"]
    return row


def gloo(size: Size, ends: Ends) -> dict[str, Any]:
    """All-reduce in torch.distributed's processes."""
    for index in range(size.clients):
        ends.start("gloo", index=index)
    found = ends.results()
    rounds = zip(*(end["seconds"] for end in found), strict=True)
    moved = 2 * (size.clients - 1) / size.clients * 4 * size.parameters
    return row_of(found, [max(each) for each in rounds], moved, moved, server=False)


def flower(size: Size, ends: Ends) -> dict[str, Any]:
    """FedAvg by a Flower server and its clients."""
    port = free_port()
    ends.start("flower_server", size.flower_python, port=port)
    ends.wait_until_listening(port)
    for index in range(size.clients):
        ends.start("flower_client", size.flower_python, port=port, index=index)
    found = ends.results()
    moved = found[0]["bytes"]
    return row_of(found, found[0]["seconds"], moved, moved, server=True)


def copy(size: Size, ends: Ends) -> dict[str, Any]:
    """Coded bytes to files and back."""
    server = ends.start("copy_server", bytes=size.coded_bytes)
    assert server.stdout is not None
    line = server.stdout.readline()
    ends.check()
    for _ in range(size.clients):
        ends.start("copy_client", bytes=size.coded_bytes, port=json.loads(line)["port"])
    found = ends.results()
    rounds = zip(*(end["times"] for end in found[1:]), strict=True)
    seconds = [max(ended for _, ended in each) - min(begun for begun, _ in each) for each in rounds]
    return row_of(found, seconds, size.coded_bytes, size.coded_bytes, server=True)


PEERS: dict[str, Callable[[Size, Ends], dict[str, Any]]] = {
    "gloo": gloo,
    "flower": flower,
    "copy": copy,
}


# --- rows ---------------------------------------------------------------------------------------


def sizes(
    peers: Iterable[str], parameters: Iterable[int], clients: Iterable[int], like: Size
) -> Iterator[tuple[str, Size]]:
    """Every peer in every size, the smallest models first; the rest is that of `like`."""
    for values, count, peer in itertools.product(sorted(parameters), clients, peers):
        yield peer, evolve(like, clients=count, parameters=values)


def cannot(peer: str, size: Size) -> str:
    """Why the peer has no figures of this size, or an empty string."""
    if peer == "gloo" and size.clients < 2:
        return "one rank has nothing to reduce with"
    return cannot_flower(size) if peer == "flower" else ""


def cannot_flower(size: Size) -> str:
    """Why Flower has no figures of this size, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="sync-peers-", dir=size.folder) as home:
        done = subprocess.run(
            [size.flower_python, "-c", "import flwr, numpy"],
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
            env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": home},
        )
    if done.returncode:
        return (done.stderr.strip() or f"{size.flower_python} has no flwr").splitlines()[-1]
    model_bytes = 4 * size.parameters
    if model_bytes + MESSAGE_FRAME_BYTES > FLOWER_LIMIT_BYTES:
        return f"{model_bytes} bytes are more than a message of {FLOWER_LIMIT_BYTES} bytes holds"
    needed, free = model_bytes * (FLOWER_EACH * size.clients + FLOWER_BEYOND), available_bytes()
    if free is not None and needed > free:
        return f"needs about {needed / 1e9:.0f} GB of memory; {free / 1e9:.0f} GB are available"
    return ""


def measure(peer: str, size: Size, *, small: bool) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {
        "bench": "sync_peer",
        "peer": peer,
        "clients": size.clients,
        "parameters": size.parameters,
        "rounds": size.rounds - 1,
    }
    if why := cannot(peer, size):
        return {**row, "skipped": why}
    limit = limits.measure(size.folder, small=small)
    with (
        tempfile.TemporaryDirectory(prefix="sync-peers-", dir=size.folder) as work,
        Ends(size, Path(work)) as ends,
    ):
        row |= PEERS[peer](size, ends)
    grown = row.pop("server_grown_bytes")
    over_model = None if grown is None else round(grown / (4 * size.parameters), 3)
    return {
        **row,
        "peak_above_start_over_model": over_model,
        **limit,
        "load_1m": round(os.getloadavg()[0], 2),
    }


@click.command()
@click.option("--parameters", multiple=True, type=int, default=(25_000_000, 100_000_000))
@click.option("--clients", multiple=True, type=int, default=(1, 6), show_default=True)
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), default=list(PEERS))
@click.option("--rounds", default=3, show_default=True, help="After the one that warms up.")
@click.option("--coded-bits", default=2.19, show_default=True, help="Bits a value, for copy.")
@click.option("--flower-python", default=sys.executable, help="A Python with flwr and NumPy.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Disk to use.")
@click.option("--smoke", is_flag=True, help="Tiny, to check that it works.")
def main(
    *,
    parameters: tuple[int, ...],
    clients: tuple[int, ...],
    peers: tuple[str, ...],
    rounds: int,
    coded_bits: float,
    flower_python: str,
    folder: Path | None,
    smoke: bool,
) -> None:
    """Measure peers; print one JSON object a line."""
    if smoke:
        parameters, clients, rounds = (300_000,), (2,), 1
    disk = folder or Path(tempfile.gettempdir())
    like = Size(0, 0, rounds + 1, coded_bits, flower_python, disk)
    for peer, size in sizes(peers, parameters, clients, like):
        print(json.dumps(measure(peer, size, small=smoke)), flush=True)


if __name__ == "__main__":
    main()

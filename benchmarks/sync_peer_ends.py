"""One process of a peer of benchmarks/sync_peers.py: a rank, a server or a client.

    python benchmarks/sync_peer_ends.py TASK

TASK is a JSON object; its `end` names a function in `ENDS`. The last line of stdout is a JSON
object: memory (VmRSS before the model, VmHWM at the end, bytes) and what the end has measured.
Flower's ends run under an interpreter that need not have this project's packages: at the top only
the standard library is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

BUFFER_BYTES = 1 << 20
GO, DONE = b"g", b"d"
FLOWER_LIMIT_BYTES = 2**31 - 1
"""Longest gRPC message, of any library: protobuf counts in signed 32 bits."""

Task = dict[str, Any]


def memory_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (the peak so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {name} in /proc/self/status")


# --- gloo ---------------------------------------------------------------------------------------


def gloo(task: Task) -> dict[str, Any]:
    """A rank: all-reduce a vector in each round, between two barriers."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    start_bytes = memory_bytes("VmRSS")
    rank, ranks, parameters = task["index"], task["clients"], task["parameters"]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{task['folder']}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=task["timeout_s"]),
    )
    vector = torch.empty(parameters, dtype=torch.float32)
    seconds = []
    for _ in range(task["rounds"]):
        vector.fill_(rank + 1)
        distributed.barrier()
        begun = time.monotonic()
        distributed.all_reduce(vector)
        distributed.barrier()
        seconds.append(time.monotonic() - begun)
        if not bool((vector == ranks * (ranks + 1) // 2).all()):
            raise RuntimeError(f"a sum over {ranks} ranks is wrong")
    distributed.destroy_process_group()
    return {"start_bytes": start_bytes, "seconds": seconds, "version": torch.__version__}


# --- Flower -------------------------------------------------------------------------------------


def flower_server(task: Task) -> dict[str, Any]:
    """Flower's server: FedAvg over all clients, a round timed from its orders to its mean."""
    import numpy as np
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import ServerConfig, SimpleClientManager, start_server
    from flwr.server.server import Server
    from flwr.server.strategy import FedAvg

    clients = task["clients"]
    start_bytes = memory_bytes("VmRSS")
    seconds: list[float] = []

    class TimedServer(Server):
        """Notes the seconds of each round once all clients are there."""

        def fit_round(self, server_round: int, timeout: float | None) -> Any:
            """Run the round."""
            if not self.client_manager().wait_for(clients, timeout=60):
                raise RuntimeError(f"fewer than {clients} clients came")
            begun = time.monotonic()
            done = super().fit_round(server_round, timeout)
            seconds.append(time.monotonic() - begun)
            if done is None or done[0] is None:
                raise RuntimeError("a client failed")
            return done

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        accept_failures=False,
        initial_parameters=ndarrays_to_parameters([np.zeros(task["parameters"], np.float32)]),
    )
    server = TimedServer(client_manager=SimpleClientManager(), strategy=strategy)
    start_server(
        server_address=f"127.0.0.1:{task['port']}",
        server=server,
        config=ServerConfig(num_rounds=task["rounds"]),
        grpc_max_message_length=FLOWER_LIMIT_BYTES,
    )
    (mean,) = parameters_to_ndarrays(server.parameters)
    if abs(mean[0] - (clients + 1) / 2) > 1e-5 or mean.dtype != np.float32:
        raise RuntimeError(f"the mean of {clients} clients is {mean[0]} ({mean.dtype})")
    return {
        "start_bytes": start_bytes,
        "seconds": seconds,
        "bytes": sum(map(len, server.parameters.tensors)),
        "version": importlib.metadata.version("flwr"),
    }


def flower_client(task: Task) -> dict[str, Any]:
    """Flower's NumPy client: trains nothing and returns the same array in each round."""
    import numpy as np
    from flwr.client import NumPyClient, start_client

    start_bytes = memory_bytes("VmRSS")
    array = np.full(task["parameters"], task["index"] + 1, np.float32)

    class Client(NumPyClient):
        """Answers at once."""

        def fit(self, parameters: Any, config: Any) -> Any:
            """Return the array, one example and no metrics."""
            return [array], 1, {}

    start_client(
        server_address=f"127.0.0.1:{task['port']}",
        client=Client().to_client(),
        grpc_max_message_length=FLOWER_LIMIT_BYTES,
        max_wait_time=60,
    )
    return {"start_bytes": start_bytes}


# --- copy ---------------------------------------------------------------------------------------


def receive(connection: socket.socket, size: int, room: memoryview) -> Any:
    """Yield the next `size` bytes as parts of `room`."""
    left = size
    while left:
        count = connection.recv_into(room, min(left, len(room)))
        if not count:
            raise RuntimeError(f"the connection ended {left} bytes too early")
        left -= count
        yield room[:count]


def copy_server(task: Task) -> dict[str, Any]:
    """Write each client's stream to a file of its own with fsync, then send one back to all.

    A thread for each client. All wait for each other before a round, which begins with a byte to
    each client, until all files are durable, and after the round.
    """
    clients, size, folder = task["clients"], task["bytes"], Path(task["folder"])
    start_bytes = memory_bytes("VmRSS")
    barrier = threading.Barrier(clients, timeout=task["timeout_s"])
    problems: list[BaseException] = []

    def serve(index: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        room = memoryview(bytearray(BUFFER_BYTES))
        path = folder / f"delta-{index}"
        for _ in range(task["rounds"]):
            with path.open("wb", buffering=0) as file:
                barrier.wait()
                connection.sendall(GO)
                for part in receive(connection, size, room):
                    file.write(part)
                os.fsync(file.fileno())
            barrier.wait()
            with (folder / "delta-0").open("rb") as update:
                connection.sendfile(update, count=size)
            if connection.recv(1) != DONE:
                raise RuntimeError("a client ended early")
            barrier.wait()
            path.unlink()

    def guarded(index: int, connection: socket.socket) -> None:
        try:
            serve(index, connection)
        except BaseException as problem:
            problems.append(problem)
            barrier.abort()
            raise

    with socket.create_server(("127.0.0.1", 0), backlog=clients) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        connections = [listener.accept()[0] for _ in range(clients)]
    threads = [
        threading.Thread(target=guarded, args=(index, connection))
        for index, connection in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise RuntimeError(f"a round of copies failed: {problems[0]!r}")
    return {"start_bytes": start_bytes}


def copy_client(task: Task) -> dict[str, Any]:
    """Send a stream and receive one, in each round, and note when (the machine's clock)."""
    size = task["bytes"]
    data = memoryview(os.urandom(BUFFER_BYTES))
    room = memoryview(bytearray(BUFFER_BYTES))
    start_bytes = memory_bytes("VmRSS")
    times = []
    with socket.create_connection(("127.0.0.1", task["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(task["rounds"]):
            for _go in receive(connection, 1, room):
                begun = time.monotonic()
            for start in range(0, size, BUFFER_BYTES):
                connection.sendall(data[: size - start])
            for _part in receive(connection, size, room):
                ended = time.monotonic()
            times.append((begun, ended))
            connection.sendall(DONE)
    return {"start_bytes": start_bytes, "times": times}


ENDS: dict[str, Callable[[Task], dict[str, Any]]] = {
    end.__name__: end for end in (gloo, flower_server, flower_client, copy_server, copy_client)
}


def main() -> None:
    """Do the task of the first argument."""
    task = json.loads(sys.argv[1])
    found = ENDS[task["end"]](task)
    print(json.dumps({**found, "peak_bytes": memory_bytes("VmHWM")}), flush=True)


if __name__ == "__main__":
    main()

"""Physical limits of this machine, measured in the run that quotes them: memory, disk, loopback.

    python benchmarks/limits.py [--folder DIR]

Each is the median of a few short measurements in one thread (the socket: a sender and a receiver),
in GB/s with GB = 10^9 bytes. They are what plain system calls reach from Python with large buffers,
not the hardware's peak.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

GB = 1e9
MIB = 1 << 20
REPEATS = 3
_PIECE_BYTES = 4 * MIB


def _median_gb_s(moved_bytes: int, once: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begun)
    return round(moved_bytes / statistics.median(seconds) / GB, 3)


def memcpy_gb_s(size: int = 256 * MIB, repeats: int = REPEATS) -> float:
    """Copy an array larger than any cache; counts bytes copied, so memory moves twice as many."""
    source = np.ones(size // 8)
    target = np.zeros_like(source)
    return _median_gb_s(source.nbytes, lambda: np.copyto(target, source), repeats)


def disk_gb_s(folder: Path, size: int = 256 * MIB, repeats: int = REPEATS) -> float:
    """Write a new file in pieces of 4 MiB and sync it: the least cost of a checkpoint."""
    piece = os.urandom(min(size, _PIECE_BYTES))

    def once() -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(size // len(piece)):
                file.write(piece)
            os.fsync(file.fileno())

    return _median_gb_s(size // len(piece) * len(piece), once, repeats)


def socket_gb_s(size: int = 512 * MIB, repeats: int = REPEATS) -> float:
    """Send through a TCP connection on loopback from one thread to another."""
    piece = memoryview(bytes(min(size, MIB)))
    total = size // len(piece) * len(piece)

    def once() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = threading.Thread(target=send, args=(listener.getsockname(),))
            sender.start()
            incoming, _ = listener.accept()
            room = bytearray(MIB)
            with incoming:
                left = total
                while left:
                    left -= incoming.recv_into(room)
            sender.join()

    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address) as outgoing:
            for _ in range(total // len(piece)):
                outgoing.sendall(piece)

    return _median_gb_s(total, once, repeats)


def measure(folder: Path, *, small: bool = False) -> dict[str, float]:
    """All three; `small` for a test that only checks that they run."""
    size, repeats = (4 * MIB, 1) if small else (256 * MIB, REPEATS)
    return {
        "memcpy_gb_s": memcpy_gb_s(size, repeats),
        "disk_fsync_gb_s": disk_gb_s(folder, size, repeats),
        "socket_gb_s": socket_gb_s(2 * size, repeats),
    }


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(), help="Disk to write to.")
def main(folder: Path) -> None:
    """Print the limits as one JSON object."""
    print(json.dumps({"bench": "limits", **measure(folder)}))


if __name__ == "__main__":
    main()

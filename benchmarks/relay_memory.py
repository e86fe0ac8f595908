"""What waits inside a relay when the server behind it takes nothing: in its process, in its pipes, and in the kernel for its sockets.

    python benchmarks/relay_memory.py [--clients 8] [--mib 256] [--lines 64] [--memory MIB] [--link WORDS]

One JSON row for each way, in bytes, the most of what was seen from when the server stops taking until `--watch` seconds later. Linux only: what the kernel holds is read
from /proc/PID/net/tcp, and from the relay's pipes.

  * `slow writer`: clients upload `--mib` each; the server reads, and its sink writes nothing. Credit is what holds the senders then.
  * `stopped server`: the same, and the server's process is stopped (SIGSTOP) after `--before` seconds of a transfer that runs. What was granted before is on its way.
  * `flood`: `--lines` connections that know no credit and send what TCP takes, to a sink that reads for `--before` seconds and then no more.
  * `flood that comes again`: the same, and who is closed connects anew. Loopback brings several GB/s from one weighing to the next. For a line as they are, run it in a
    network namespace: `ip netns add n; ip -n n link set lo up; ip netns exec n tc qdisc add dev lo root tbf rate 2gbit burst 2mb limit 20mb; ip netns exec n python ...`

`resident` is the growth of the relay's resident memory since before the first connection, `pipes` and `sockets` what waits there, `held` the last two together.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import termios
import threading
import time
from pathlib import Path
from typing import Any

from relay import Source, relay  # type: ignore[import-not-found]

import fsl_transport as tp
from fsl_async.nodes.relay.node import usual_memory_mib
from fsl_async.process.heap import keep_freed_blocks
from fsl_transport.loop import run
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
LOOK_S = 0.05
COMES_AGAIN_S = 0.1
FLOOD_AGAIN = "flood that comes again"


class Sink:
    """Writes at once, or never."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes

    def write(self, index: int, data: tp.Buffer, done: Any) -> None:
        """Say that it is written, if this one writes."""
        if self._writes:
            done(True)


def server(port: Any, writes: bool) -> None:
    """Take streams, for ever."""
    keep_freed_blocks()

    async def main() -> None:
        link = ZmqListener("127.0.0.1:0", None, None)

        def on_event(event: tp.TransportEvent) -> None:
            if isinstance(event, tp.HelloReceived):
                endpoint.welcome(event.peer, {})
            elif isinstance(event, tp.StreamOffered):
                endpoint.accept(event.peer, event.stream_id, Sink(writes))

        loop = asyncio.get_running_loop()
        endpoint = tp.ListenerEndpoint(link, loop, tp.TransportSettings(), on_event, "ps")
        port.put(link.port)
        await asyncio.Event().wait()

    run(main())


def clients(ready: Any, port: int, count: int, chunks: int) -> None:
    """Upload, for ever."""
    keep_freed_blocks()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        up = 0

        def begin(number: int) -> None:
            def on_event(event: tp.TransportEvent) -> None:
                nonlocal up
                if isinstance(event, tp.PeerUp):
                    up += 1
                    endpoint.offer("", f"s{time.time_ns()}", {}, Source(chunks))
                    if up == count:
                        ready.put(up)
                elif isinstance(event, tp.StreamSent):
                    endpoint.offer("", f"s{time.time_ns()}", {}, Source(chunks))

            link = ZmqDialer(f"127.0.0.1:{port}", f"c{number}", None, None)
            endpoint = tp.DialerEndpoint(
                link, loop, tp.TransportSettings(), on_event, f"c{number}", incarnation=time.time_ns()
            )  # fmt: skip
            endpoint.connect(dict)

        for number in range(count):
            begin(number)
        await asyncio.Event().wait()

    run(main())


def swallow(port: Any, seconds: float) -> None:
    """Take connections and read what comes until so long after the first one; then hold them."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port.put(listener.getsockname()[1])
    kept: list[socket.socket] = []
    ends_at = [float("inf")]

    def read(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while time.monotonic() < ends_at[0] and connection.recv(1 << 20):
                pass

    while True:
        connection, _ = listener.accept()
        if not kept:
            ends_at[0] = time.monotonic() + seconds
        kept.append(connection)
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def flood(ready: Any, port: int, lines: int, comes_again: bool) -> None:
    """Send on so many connections whatever they take."""
    data = bytes(1 << 20)

    def send() -> None:
        more = True
        while more:
            more = comes_again
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as connection,
            ):
                connection.sendall(GREETING)
                while True:
                    connection.sendall(data)
            time.sleep(COMES_AGAIN_S)

    for _ in range(lines):
        threading.Thread(target=send, daemon=True).start()
    ready.put(lines)
    threading.Event().wait()


def resident(process: int) -> int:
    """Resident memory in bytes."""
    text = Path(f"/proc/{process}/status").read_text("ascii")
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])


def waiting(process: int, place: int, behind: int) -> tuple[int, int]:
    """Bytes that wait in the pipes of a relay, and in its sockets, which are known by their ports, since some may be the kernel's alone: those that were not read and those that are not acknowledged."""
    pipes = {}
    for one in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            kind, _, number = str(one.readlink()).partition(":")
            if kind == "pipe":
                pipes.setdefault(number, one)
    in_pipes = 0
    for one in pipes.values():
        with contextlib.suppress(OSError):
            found = array.array("i", [0])
            file = os.open(one, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.ioctl(file, termios.FIONREAD, found)
            finally:
                os.close(file)
            in_pipes += found[0]
    rows = Path(f"/proc/{process}/net/tcp").read_text("ascii").splitlines()[1:]
    in_sockets = 0
    for row in map(str.split, rows):
        if row[3] == "0A":  # a listening one has counts there
            continue
        here, there = (int(end.rpartition(":")[2], 16) for end in row[1:3])
        if place == here or behind == there:
            unacknowledged, _, unread = row[4].partition(":")
            in_sockets += int(unacknowledged, 16) + int(unread, 16)
    return in_pipes, in_sockets


def main() -> None:
    """One way after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256, help="of a stream")
    parser.add_argument("--lines", type=int, default=64, help="of the flood")
    parser.add_argument("--before", type=float, default=4.0, help="seconds")
    parser.add_argument("--watch", type=float, default=12.0, help="seconds")
    parser.add_argument("--memory", type=int, default=usual_memory_mib(), help="its limit, MiB")
    parser.add_argument("--link", default="loopback", help="what the rows say of the line")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for way in ("slow writer", "stopped server", "flood", FLOOD_AGAIN):
        processes: list[Any] = []
        is_flood = way in {"flood", FLOOD_AGAIN}

        def start(function: Any, *arguments: Any, processes: list[Any] = processes) -> int:
            port = context.Queue()
            process = context.Process(target=function, args=(port, *arguments), daemon=True)
            process.start()
            processes.append(process)
            return int(port.get(timeout=60))

        if is_flood:
            behind = start(swallow, given.before)
        else:
            behind = start(server, way == "stopped server")
        place = start(relay, behind, False, given.memory)
        middle = int(processes[1].pid)
        at_first = resident(middle)
        if is_flood:
            start(flood, place, given.lines, way == FLOOD_AGAIN)
        else:
            start(clients, place, given.clients, given.mib)
        if way != "slow writer":
            time.sleep(given.before)
        if way == "stopped server":
            os.kill(int(processes[0].pid), signal.SIGSTOP)
        most = dict.fromkeys(("resident", "pipes", "sockets", "held"), 0)
        ends_at = time.monotonic() + given.watch
        while time.monotonic() < ends_at:
            pipes, sockets = waiting(middle, place, behind)
            now = {
                "resident": resident(middle) - at_first,
                "pipes": pipes,
                "sockets": sockets,
                "held": pipes + sockets,
            }
            most = {name: max(size, now[name]) for name, size in most.items()}
            time.sleep(LOOK_S)
        row = {
            "way": way,
            "memory_mib": given.memory,
            "link": given.link,
            "seconds": given.watch,
            "connections": given.lines if is_flood else None,
            "clients": None if is_flood else given.clients,
            **{f"most_{name}_bytes": size for name, size in most.items()},
            "held_at_last_bytes": now["held"],
            "tcp_rmem": Path("/proc/sys/net/ipv4/tcp_rmem").read_text("ascii").split()[2],
            "tcp_wmem": Path("/proc/sys/net/ipv4/tcp_wmem").read_text("ascii").split()[2],
        }
        print(json.dumps(row), flush=True)
        for process in processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()

"""Measures from inside a site, with the standard library alone: it is run as a file.

probe.py ping ADDRESS COUNT INTERVAL_S WAIT_S
    -> {"sent", "received", "median_ms", "min_ms", "max_ms", "doubled", "overtaken", "gaps"}
probe.py sink ADDRESS SECONDS    accepts one round of connections
    -> {"port"}, then {"bytes", "seconds"}
probe.py source ADDRESS PORT STREAMS SECONDS [CONGESTION]
    -> {"bytes", "seconds", "retransmits"}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_ECHO, _REPLY = 8, 0
_PIECE = bytes(1 << 16)
_RETRANSMITS_AT = 100  # tcpi_total_retrans in struct tcp_info, <linux/tcp.h>


def _say(**found: float) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def _checksum(data: bytes) -> int:
    """RFC 1071."""
    total = sum(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))
    total = (total >> 16) + (total & 0xFFFF)
    return 0xFFFF - ((total + (total >> 16)) & 0xFFFF)


def ping(address: str, count: int, interval_s: float, wait_s: float) -> None:
    """ICMP echo: sends on time, whatever comes back, and waits `wait_s` after the last one.

    `gaps` are runs of lost packets.
    """
    identity = os.getpid() & 0xFFFF
    sent: dict[int, float] = {}
    times: dict[int, float] = {}
    doubled = overtaken = newest = 0
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        begun = time.perf_counter()
        end = begun + (count - 1) * interval_s + wait_s
        while True:
            now = time.perf_counter()
            due = begun + len(sent) * interval_s
            if now >= end or (len(sent) == count and len(times) == count):
                break
            if len(sent) < count and now >= due:
                number = len(sent) + 1
                body = struct.pack("!BBHHH", _ECHO, 0, 0, identity, number) + bytes(8)
                head = struct.pack("!BBHHH", _ECHO, 0, _checksum(body), identity, number)
                sent[number] = time.perf_counter()
                raw.sendto(head + bytes(8), (address, 0))
                continue
            raw.settimeout(max(1e-4, (end if len(sent) == count else due) - now))
            try:
                packet = raw.recv(2048)
            except (TimeoutError, BlockingIOError):
                continue
            kind, _, _, who, number = struct.unpack("!BBHHH", packet[20:28])
            if (kind, who) != (_REPLY, identity) or number not in sent:
                continue
            if number in times:
                doubled += 1
                continue
            times[number] = time.perf_counter() - sent[number]
            overtaken += number < newest
            newest = max(newest, number)
    took = sorted(times.values()) or [float("inf")]
    _say(
        sent=len(sent),
        received=len(times),
        median_ms=round(1e3 * took[len(took) // 2], 3),
        min_ms=round(1e3 * took[0], 3),
        max_ms=round(1e3 * took[-1], 3),
        doubled=doubled,
        overtaken=overtaken,
        gaps=sum(one not in times and one - 1 in times for one in sent),
    )


async def sink(address: str, seconds: float) -> None:
    """Count what comes over all connections, from the first byte on, until they are closed."""
    import asyncio  # not for `ping`, which is run often

    total = 0
    first = last = 0.0
    opened = closed = 0
    done = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal total, first, last, opened, closed
        opened += 1
        # The source resets connections that it does not wait for.
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                last = time.perf_counter()
                first = first or last
                total += len(data)
        writer.close()
        closed += 1
        if closed == opened:
            done.set()

    server = await asyncio.start_server(take, address, 0, limit=1 << 20)
    _say(port=server.sockets[0].getsockname()[1])
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), seconds)
    _say(bytes=total, seconds=round(max(last - first, 0.0), 4))


async def source(
    address: str, port: int, streams: int, seconds: float, congestion: str = ""
) -> None:
    """Send as fast as the connections take it, for so many seconds."""
    import asyncio

    total = 0
    retransmits = 0
    begun = time.perf_counter()

    async def give() -> None:
        nonlocal total, retransmits
        _, writer = await asyncio.open_connection(address, port)
        connection = writer.get_extra_info("socket")
        if congestion:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        while time.perf_counter() - begun < seconds:
            writer.write(_PIECE)
            total += len(_PIECE)
            with contextlib.suppress(TimeoutError):
                left = max(0.0, begun + seconds - time.perf_counter())
                await asyncio.wait_for(writer.drain(), left)
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        retransmits += struct.unpack_from("I", info, _RETRANSMITS_AT)[0]
        # What is in the kernel's buffer would still be sent, for seconds on a slow line.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    await asyncio.gather(*(give() for _ in range(streams)))
    _say(bytes=total, seconds=round(time.perf_counter() - begun, 4), retransmits=retransmits)


def main(kind: str, *words: str) -> None:
    """Run one probe."""
    if kind == "ping":
        ping(words[0], int(words[1]), float(words[2]), float(words[3]))
        return
    import asyncio

    if kind == "sink":
        asyncio.run(sink(words[0], float(words[1])))
    else:
        asyncio.run(source(words[0], int(words[1]), int(words[2]), float(words[3]), *words[4:5]))


if __name__ == "__main__":
    main(*sys.argv[1:])

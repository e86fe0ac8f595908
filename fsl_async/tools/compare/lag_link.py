"""A TCP proxy with delay and rate, in this process: what an ideal long line does to a connection, without a laboratory.

Each direction of each connection has its own line: bytes leave it at the rate and arrive one delay later, in order. It knows no loss, no jitter, and no slow start
of TCP over the long way (the two ends' kernels see a short one), so it flatters the network; `netlab` has all of that. Every connection has the
whole rate to itself: a client has one for bulk that counts, and a few that carry little.

    link = LagLink(LinkSpec(200e6, 0.045)); link.address -> "tcp://127.0.0.1:..."; link.target = ("127.0.0.1", 7100); link.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque

from fsl_async.plan.link import LinkSpec

PIECE_BYTES = 1 << 16
AHEAD_S = 0.02
"""How far ahead of the line the sender may be before it is read no further; then its own socket fills, as on a real line."""
_CONNECT_S = 20.0


class LagLink:
    """One address that stands for `target`, which may become known later. Runs in a thread of its own."""

    def __init__(self, link: LinkSpec) -> None:
        self.link = link
        self.target: tuple[str, int] | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        """Where to dial."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lag-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(self._take, sock=self._socket))
        try:
            loop.run_forever()
        finally:
            server.close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
            await self._join(reader, writer)
        writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        deadline = self._loop.time() + _CONNECT_S
        while self.target is None:
            if self._loop.time() > deadline:
                return
            await asyncio.sleep(0.01)
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        for end in (writer, far_writer):
            found: socket.socket = end.get_extra_info("socket")
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = [
            asyncio.create_task(_Line(self.link, self._loop).carry(reader, far_writer)),
            asyncio.create_task(_Line(self.link, self._loop).carry(far_reader, writer)),
        ]
        try:
            await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for line in lines:
                line.cancel()
            far_writer.transport.abort()


class _Line:
    """One direction of one connection."""

    def __init__(self, link: LinkSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._link, self._loop = link, loop
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._more = asyncio.Event()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes."""
        arriving = asyncio.create_task(self._arrive(writer))
        try:
            while data := await reader.read(PIECE_BYTES):
                now = self._loop.time()
                self._free_at = max(now, self._free_at) + 8 * len(data) / self._link.bits_per_s
                self._under_way.append((self._free_at + self._link.delay_s, data))
                self._more.set()
                if self._free_at > now + AHEAD_S:
                    await asyncio.sleep(self._free_at - now - AHEAD_S)
            self._under_way.append((self._loop.time() + self._link.delay_s, b""))
            self._more.set()
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(self, writer: asyncio.StreamWriter) -> None:
        while True:
            while not self._under_way:
                self._more.clear()
                await self._more.wait()
            due, data = self._under_way.popleft()
            wait = due - self._loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            if not data:
                return
            writer.write(data)
            await writer.drain()

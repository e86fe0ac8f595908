"""A TCP proxy that stands for a long, slow or cut link, without a network laboratory.

Each direction of each connection has its own link: bytes leave it at the link's rate and arrive
one delay later, in order. It has no loss, no jitter and no slow start of TCP over the long way (the
two ends' kernels measure a short one), so it flatters the network; docs/netlab.md has all of that.
Every connection has the whole rate to itself: a client has one for bulk that counts, and a few that
carry little.

    proxy = Proxy(("127.0.0.1", 7100), LinkSpec(200e6, 0.045))
    dial(proxy.address)
    proxy.close()

A proxy can follow a file, read ten times a second, whose word is one of

    open                everything passes
    slow BYTES_PER_S    so much passes
    cut                 nothing is read on either side, so the kernels' buffers fill and then
                        nothing passes, as over a link that drops all; what is on its way still
                        arrives. Connections stay; new ones lead nowhere until it is open
"""

import asyncio
import contextlib
import math
import socket
import threading
from collections import deque
from pathlib import Path

from attrs import evolve

from fsl_async.plan.link import LinkSpec

NO_LIMITS = LinkSpec(math.inf)
AHEAD_S = 0.02
"""Seconds by which the sender may be ahead of the link; beyond that it is not read, and its socket
fills.
"""
_PIECE_BYTES = 1 << 16
_SLOW_PIECE_BYTES = 1 << 11
_LOOK_S = 0.1
_CONNECT_S = 20.0


class Proxy:
    """One address of the loopback that stands for `target`, which may become known later.

    Runs in a thread of its own. `follow`: the file that it follows, made here with the word "open".
    Raises OSError.
    """

    def __init__(
        self,
        target: tuple[str, int] | None = None,
        link: LinkSpec = NO_LIMITS,
        *,
        follow: Path | None = None,
    ) -> None:
        self.target, self.link = target, link
        self._follow = follow
        if follow is not None:
            follow.parent.mkdir(exist_ok=True)
            follow.write_text("open")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        """Where to dial."""
        self._closing = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection and stop listening; again is harmless."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._socket)
        if self._follow is not None:
            self._watching = asyncio.create_task(self._watch(self._follow))
        await self._closing.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections close their sockets now

    async def _watch(self, path: Path) -> None:
        whole = self.link
        while True:
            with contextlib.suppress(OSError, ValueError):
                self._obey(path, whole)
            await asyncio.sleep(_LOOK_S)

    def _obey(self, path: Path, whole: LinkSpec) -> None:
        word, _, rate = path.read_text().strip().partition(" ")
        bits_per_s = max(1.0, 8 * float(rate)) if word == "slow" else whole.bits_per_s
        self.link = evolve(whole, bits_per_s=bits_per_s)
        if word == "cut":
            self._open.clear()
        else:
            self._open.set()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
            await self._join(reader, writer)
        writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        deadline = self._loop.time() + _CONNECT_S
        while self.target is None:
            if self._loop.time() > deadline:
                return
            await asyncio.sleep(0.01)
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        lines = [
            asyncio.create_task(_Line(self, self._open).carry(reader, far_writer)),
            asyncio.create_task(_Line(self, self._open).carry(far_reader, writer)),
        ]
        try:
            await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for line in lines:
                line.cancel()
            far_writer.transport.abort()


class _Line:
    """One direction of one connection."""

    def __init__(self, proxy: Proxy, is_open: asyncio.Event) -> None:
        self._proxy, self._open = proxy, is_open
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._more = asyncio.Event()
        self._taken = asyncio.Event()
        """Whether the receiver takes what arrives; else nothing more is read."""
        self._taken.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes."""
        with contextlib.suppress(OSError):
            await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        arriving = asyncio.create_task(self._arrive(writer, loop))
        try:
            while data := await self._read(reader):
                # A read may have begun while the link was fast: it is cut for the present rate.
                link, now, size = self._proxy.link, loop.time(), self._piece_bytes
                for start in range(0, len(data), size):
                    piece = data[start : start + size]
                    self._free_at = max(now, self._free_at) + 8 * len(piece) / link.bits_per_s
                    self._under_way.append((self._free_at + link.delay_s, piece))
                self._more.set()
                if self._free_at > now + AHEAD_S:
                    await asyncio.sleep(self._free_at - now - AHEAD_S)
            self._under_way.append((loop.time() + self._proxy.link.delay_s, b""))
            self._more.set()
            await arriving
        finally:
            arriving.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        await self._taken.wait()
        await self._open.wait()
        data = await reader.read(self._piece_bytes)
        await self._open.wait()  # what came while it was cut waits
        return data

    @property
    def _piece_bytes(self) -> int:
        """A piece arrives as a whole, so it must not take long at the rate."""
        fitting = self._proxy.link.bits_per_s * AHEAD_S / 8
        return int(min(max(fitting, _SLOW_PIECE_BYTES), _PIECE_BYTES))

    async def _arrive(self, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):  # the other direction's end cuts both
            while True:
                while not self._under_way:
                    self._more.clear()
                    await self._more.wait()
                due, data = self._under_way.popleft()
                wait = due - loop.time()
                if wait > 0:
                    await asyncio.sleep(wait)
                if not data:
                    return
                writer.write(data)
                self._taken.clear()
                await writer.drain()
                self._taken.set()

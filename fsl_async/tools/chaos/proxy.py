"""A TCP proxy that can be cut or made slow while connections stand: a client's link, in a run without a laboratory.

It does what its file says (`fsl_async.tools.chaos.links`), looked at ten times a second. While it is cut nothing is read on either side, so the kernels' buffers fill and
then nothing passes, as over a link that drops all; connections stay, and new ones are taken but lead nowhere. `slow` paces each direction of
each connection. It has no delay, jitter or loss: a network laboratory has (docs/netlab.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path

_PIECE_BYTES = 1 << 16
_SLOW_PIECE_BYTES = 1 << 11
_LOOK_S = 0.1


class CutLink:
    """Listens on a free port of the loopback and leads to `target`. For one asyncio loop."""

    def __init__(self, path: Path, target: tuple[str, int]) -> None:
        """Writes the file at `path`: open. Raises OSError."""
        self.address = ""
        self._path = path
        self._target = target
        self._open = asyncio.Event()
        self._bytes_per_s = 0.0  # 0: as fast as it goes
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        path.parent.mkdir(exist_ok=True)
        path.write_text("open")

    async def start(self) -> str:
        """Listen; returns the address to dial."""
        self._open.set()
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"tcp://{host}:{port}"
        self._keep(self._watch())
        return self.address

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                word, _, rate = self._path.read_text().strip().partition(" ")
                self._bytes_per_s = float(rate) if word == "slow" else 0.0
                if word == "cut":
                    self._open.clear()
                else:
                    self._open.set()
            await asyncio.sleep(_LOOK_S)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            far_reader, far = await asyncio.open_connection(*self._target)
            lines = [
                self._keep(self._carry(reader, far)),
                self._keep(self._carry(far_reader, writer)),
            ]
            try:
                await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for line in lines:
                    line.cancel()
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                await self._open.wait()
                data = await reader.read(_SLOW_PIECE_BYTES if self._bytes_per_s else _PIECE_BYTES)
                if not data:
                    return
                await self._open.wait()  # what came while it was cut waits
                if self._bytes_per_s:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        """Cut every connection and stop listening."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

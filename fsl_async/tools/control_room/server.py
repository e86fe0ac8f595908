"""HTTP on loopback: the page, its assets, and one stream of events for each open page.

One asyncio loop does all: it takes new lines of the journals every `_READ_EVERY_S` in small turns,
and each stream sends what its page has not got, at most every `_SEND_EVERY_S`, when the last
message is out. So fifty lines a second or fifty thousand cost a page the same number of messages.
Audits are made by threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from fsl_async.errors import AddressError, UsageError
from fsl_async.process.program import to_install
from fsl_async.tools.control_room import snapshot
from fsl_async.tools.control_room.feed import Cursor
from fsl_async.tools.control_room.gate import HEADERS, Gate
from fsl_async.tools.control_room.watched import AUDIT_EVERY_S, WatchedNode

if TYPE_CHECKING:
    from aiohttp import web

_READ_EVERY_S = 0.1
_SEND_EVERY_S = 0.25
_BUSY_S = 0.02
"""Between two turns of a journal that has more lines."""
_KEEP_ALIVE_S = 15.0
_STALLED_S = 60.0
"""A page that takes nothing for so long is gone."""
_HEARTBEAT_STATE_S = 5.0
"""The state is sent this often without a change: it may end to be alive."""
MAX_PAGES = 16
_ASSETS = Path(__file__).parent / "assets"


def check_installed() -> None:
    """Raise UsageError without aiohttp."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError(f"--web needs aiohttp, which is not installed: {to_install('web')}")


@define
class Room:
    """The nodes of a run and what all pages share."""

    nodes: list[WatchedNode]
    gate: Gate | None = None
    pages: int = 0
    _state: tuple[tuple[int, ...], float, list[dict[str, Any]]] | None = None

    def revision(self) -> tuple[int, ...]:
        """Changes with anything that is shown."""
        return tuple(node.revision for node in self.nodes)

    def state(self) -> list[dict[str, Any]]:
        """The snapshots of all nodes; made once for all pages."""
        now, revision = time.time(), self.revision()
        if self._state is None or self._state[0] != revision or now > self._state[1] + 1.0:
            found = [snapshot.node(at, node, now) for at, node in enumerate(self.nodes)]
            self._state = revision, now, found
        return self._state[2]

    async def read(self) -> None:
        """Take new lines, for ever."""
        while True:
            has_more = False
            for node in self.nodes:
                has_more |= node.read()
                await asyncio.sleep(0)
            await asyncio.sleep(_BUSY_S if has_more else _READ_EVERY_S)

    async def look(self) -> None:
        """Audit while a page is open, at most every `AUDIT_EVERY_S` and a tenth of the time."""
        while True:
            begun = time.monotonic()
            for node in self.nodes if self.pages else ():
                audit, evaluations = await asyncio.to_thread(node.look)
                if (audit, evaluations) != (node.audit, node.evaluations):
                    node.audit, node.evaluations = audit, evaluations
                    node.revision += 1
            took = time.monotonic() - begun
            await asyncio.sleep(max(AUDIT_EVERY_S, 9 * took) if self.pages else 0.2)


async def _guarded(room: Room, request: web.Request, handler: Any) -> web.StreamResponse:
    """Judge a request, and give every answer its headers."""
    from aiohttp import web

    gate = room.gate
    if gate is None:
        return web.Response(status=503)
    verdict = gate.judge(
        request.method,
        request.headers.get("Host", ""),
        request.path,
        request.query.get("token"),
        request.cookies.get(gate.cookie),
    )
    response: web.StreamResponse
    if verdict.status == 303:
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(gate.cookie, gate.token, httponly=True, samesite="Strict", path="/")
    elif verdict.status != 200:
        response = web.Response(status=verdict.status, text=verdict.text + "\n")
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.reason}\n")
    if not response.prepared:
        response.headers.update(HEADERS)
    return response


def application(room: Room) -> web.Application:
    """The web application; `room.gate` must be set before the first request."""
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        return await _guarded(room, request, handler)

    async def page(_: web.Request) -> web.StreamResponse:
        """The page; all that it shows comes by `events`."""
        return web.FileResponse(_ASSETS / "index.html")

    async def state(_: web.Request) -> web.StreamResponse:
        """The present state as JSON, for programs."""
        return web.json_response({"now": time.time(), "nodes": room.state()})

    async def events(request: web.Request) -> web.StreamResponse:
        """The stream of one page, until it is closed."""
        if room.pages >= MAX_PAGES:
            raise web.HTTPTooManyRequests
        response = web.StreamResponse(headers=dict(HEADERS))
        response.content_type = "text/event-stream"
        await response.prepare(request)
        room.pages += 1
        try:
            async for message in stream(room):
                await asyncio.wait_for(response.write(message), _STALLED_S)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            room.pages -= 1
        return response

    made = web.Application(middlewares=[guard])
    for path, handler in (("/", page), ("/events", events), ("/state", state)):
        made.router.add_get(path, handler, allow_head=False)
    made.router.add_static("/assets", _ASSETS)
    return made


def event(name: str, data: Any) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode(errors="replace")


async def stream(room: Room) -> AsyncIterator[bytes]:
    """The events of one page: the state, then what is new of the courses over time."""
    cursors = [Cursor(at) for at in range(len(room.nodes))]
    seen: tuple[int, ...] = ()
    sent_at = quiet_at = time.monotonic()
    held_out: list[Any] = [None] * len(room.nodes)
    while True:
        now = time.monotonic()
        is_new = room.revision() != seen
        if is_new or now > sent_at + _HEARTBEAT_STATE_S:
            seen, sent_at = room.revision(), now
            yield event("state", {"now": time.time(), "nodes": room.state()})
            for at, (cursor, node) in enumerate(zip(cursors, room.nodes, strict=True)):
                for part in cursor.parts(node.history):
                    yield event("series", part)
                    await asyncio.sleep(0)
                rows = snapshot.held_out_rows(node)
                if rows != held_out[at]:
                    held_out[at] = rows
                    yield event("held_out", {"node": at, "rows": rows})
            yield event("drawn", {})
            quiet_at = now
        elif now > quiet_at + _KEEP_ALIVE_S:
            quiet_at = now
            yield b": still here\n\n"
        await asyncio.sleep(_SEND_EVERY_S)


async def serve(nodes: list[WatchedNode], port: int, announce: Callable[[str], None]) -> None:
    """Serve until cancelled. port: 0 for any free one. Raises AddressError for a taken port."""
    from aiohttp import web

    room = Room(nodes)
    runner = web.AppRunner(application(room), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    tasks: list[asyncio.Task[None]] = []
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise AddressError(
                f"cannot serve the page at 127.0.0.1:{port} ({error.strerror}): give another port,"
                " or --web without one for any that is free"
            ) from None
        bound = int(runner.addresses[0][1])
        room.gate = Gate(bound)
        announce(room.gate.url)
        tasks = [asyncio.create_task(room.read()), asyncio.create_task(room.look())]
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await runner.cleanup()


def run(run_dir: Path, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page of `run_dir` until Ctrl-C. Raises FslError."""
    from fsl_async.tools.control_room.watched import watch

    check_installed()
    nodes = watch(run_dir)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(nodes, port, announce))

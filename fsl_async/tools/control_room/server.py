"""HTTP on loopback: the page, its assets, and one stream of events for each open page.

One asyncio loop does all: it takes new lines of the journals every `_READ_EVERY_S` in small turns,
and each stream sends what its page has not got, at most every `_SEND_EVERY_S`, when the last
message is out. So fifty lines a second or fifty thousand cost a page the same number of messages.
Audits are made by threads.

The page is read-only and for one person on this machine, but a browser also runs other people's
pages, and every local user can connect to a port of loopback. So:

- `Host` must name loopback and our port: a name that a foreign page points here (DNS rebinding)
  is refused.
- A random token in the printed URL becomes a cookie (HttpOnly, SameSite=Strict), named after the
  port since cookies are shared by all ports of a host. Without it nothing but a refusal is sent.
- GET only. Nothing of the run can be changed.
- No inline script, no foreign source (`HEADERS`).

A page holds a copy of the columns and timelines. `Cursor.parts` yields messages that bring the copy
up to date: each is small enough that the loop is not held for long, and a page that reads slowly
gets fewer and larger ones, because the next message is made when the last one is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.util
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen, mutable

from fsl_async.errors import AddressError, UsageError, to_install
from fsl_async.observe.history import STATES, History, Timeline, as_dict, of_client
from fsl_async.tools.control_room import snapshot
from fsl_async.tools.control_room.snapshot import AUDIT_EVERY_S, WatchedNode

if TYPE_CHECKING:
    from aiohttp import web


CLIENTS_A_PART = 8


@mutable
class _Place:
    """What the page has of one client's timeline."""

    line: Timeline
    clock: int = -1
    generation: int = 0
    segments: int = 0


@mutable
class Cursor:
    """What one page has of one node."""

    node: int
    _rounds: int = 0
    _bytes: int = -1
    _places: dict[str, _Place] = field(factory=dict)

    def parts(self, history: History) -> Iterator[dict[str, Any]]:
        """Messages, in order."""
        series = history.rounds
        if series.clock != self._rounds:
            found = as_dict(series, self._rounds)
            self._rounds = series.clock
            begin = int(found["begin"])
            yield {"node": self.node, "rounds": found}
            names = list(series.clients)
            for at in range(0, len(names), CLIENTS_A_PART):
                columns = {
                    name: of_client(series, name, begin) for name in names[at : at + CLIENTS_A_PART]
                }
                yield {"node": self.node, "begin": begin, "clients": columns}
        if history.bytes.clock != self._bytes:
            self._bytes = history.bytes.clock
            samples = {name: list(column) for name, column in history.bytes.columns.items()}
            yield {"node": self.node, "bytes": samples}
        dropped = [
            name
            for name, place in self._places.items()
            if history.timelines.get(name) is not place.line
        ]
        if dropped:
            for name in dropped:
                del self._places[name]
            yield {"node": self.node, "dropped": dropped}
        names = [name for name in history.timelines if self._is_new(name, history.timelines[name])]
        for at in range(0, len(names), CLIENTS_A_PART):
            some = names[at : at + CLIENTS_A_PART]
            lines = {name: self._timeline(name, history.timelines[name]) for name in some}
            yield {"node": self.node, "timelines": lines}

    def _is_new(self, name: str, line: Timeline) -> bool:
        place = self._places.get(name)
        return place is None or place.clock != line.clock

    def _timeline(self, name: str, line: Timeline) -> dict[str, Any]:
        place = self._places.setdefault(name, _Place(line))
        # The newest two segments may have changed since.
        begin = max(0, place.segments - 2) if place.generation == line.generation else 0
        place.clock, place.generation = line.clock, line.generation
        place.segments = len(line.begins)
        return {
            "begin": begin,
            "t": [round(t, 2) for t in line.begins[begin:]],
            "states": [STATES[state] for state in line.states[begin:]],
            "marks": [[round(t, 2), what] for t, what in line.marks],
        }


HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer."""


@frozen
class Verdict:
    """status: 200 goes on; 303 sets the cookie and leads to the page; else a refusal."""

    status: int
    text: str = ""


@frozen
class Gate:
    """The rules of one server at `port`."""

    port: int
    token: str = field(factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie(self) -> str:
        """The cookie's name."""
        return f"fsl-control-room-{self.port}"

    @property
    def url(self) -> str:
        """What a person opens."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def judge(
        self, method: str, host: str, path: str, token: str | None, cookie: str | None
    ) -> Verdict:
        """Decide about a request.

        host: the header. token: of the URL's query. cookie: the value of ours; None where missing.
        """
        if host.lower() not in {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}:
            return Verdict(421, "this is no name of the control room")
        if method != "GET":
            return Verdict(405, "the control room is read-only")
        if token is not None and path == "/":
            if _same(token, self.token):
                return Verdict(303)
            return Verdict(403, "wrong token: open the address that fsl-node status has printed")
        if cookie is None or not _same(cookie, self.token):
            return Verdict(403, "no token: open the address that fsl-node status has printed")
        return Verdict(200)


def _same(found: str, expected: str) -> bool:
    return hmac.compare_digest(found.encode(errors="replace"), expected.encode())


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
    from fsl_async.tools.control_room.snapshot import watch

    check_installed()
    nodes = watch(run_dir)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(nodes, port, announce))

"""A relay in a running loop: its ports, its connections, its reports, and how it drains.

`serve` runs the process of a relay. It needs neither NumPy nor torch.
"""

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from fsl_async.errors import AddressError, RunDirError, UsageError, disk_words
from fsl_async.nodes.relay.pair import Drop, Dropped, Pair
from fsl_async.observe.journal import JournalWriter
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import Note
from fsl_async.roles.phrasing import counted, megabytes
from fsl_transport import LocalError
from fsl_transport.loop import run as run_loop
from fsl_transport.relay.buffer import PIPE_FILES, PipePool
from fsl_transport.relay.resolver import Resolver, describe
from fsl_transport.session.access_control import address_prefix
from fsl_transport.zmq.admission import descriptors
from fsl_transport.zmq.link import split_address

REPORT_S: Final = 60.0
DRAIN_S: Final = 10.0
DRAIN_LOOK_S: Final = 0.5
_ACCEPTS_PER_TURN: Final = 32
_ACCEPT_PAUSE_S: Final = 0.2


QUIET_BYTES: Final = 64 * 1024
"""Bytes that heartbeats may carry on all connections between two looks at a relay that drains."""


@frozen
class Route:
    """Address to listen at, address of the server behind it, and whether it requires CURVE."""

    listen: str
    server: str
    requires_curve: bool


@frozen
class _Port:
    """An open route."""

    route: Route
    listener: socket.socket
    server: Resolver


class Admission:
    """Counts the connections of a relay that may have `limit` of them.

    Limits count the connections that exist at one time, in all and of one address, which gets half
    of them at most. How fast an address connects, and which addresses may, is for a firewall to
    decide (docs/SECURITY.md).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.per_address = max(1, limit // 2)
        self.connections = 0
        self._of: Counter[str] = Counter()
        self._drained_bytes = -1

    @property
    def addresses(self) -> int:
        """How many addresses have a connection."""
        return len(self._of)

    def accept(self, address: str) -> str:
        """Count a connection and return "", or return why there is no place for it."""
        if self.connections >= self.limit:
            return f"{self.limit} connections already"
        if self._of[address] >= self.per_address:
            return f"{self.per_address} connections of {address} already"
        self.connections += 1
        self._of[address] += 1
        return ""

    def end(self, address: str) -> None:
        """Count a connection no more."""
        self.connections -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def may_end(self, up: int, down: int, held: int) -> bool:
        """Whether a relay that drains may end, given the bytes of all connections so far.

        It may when it has none, or when nothing is held and no more than heartbeats passed since
        the last call: transfers get time to finish, and what is cut off resumes at the chunk.
        """
        before, self._drained_bytes = self._drained_bytes, up + down
        is_quiet = 0 <= before >= up + down - QUIET_BYTES and not held
        return is_quiet or not self.connections


class Relay:
    """Forwards connections, on the loop's thread. say: takes notes for the operator."""

    def __init__(
        self, admission: Admission, journal: JournalWriter | None, say: Callable[[Note], None]
    ) -> None:
        self.accepted = 0
        self.dropped: Counter[str] = Counter()
        self._admission = admission
        self._journal = journal
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._pipes = PipePool()
        self._ports: list[_Port] = []
        self._pairs: dict[int, Pair] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = (0, 0)  # bytes up and down of the pairs that are closed
        self._unreachable: set[str] = set()
        self._warned: set[str] = set()  # topics since the last report
        self.start(self._report())

    def listen(self, route: Route) -> tuple[str, int]:
        """Open a route; return host and port. Raises AddressError if that fails."""
        try:
            host, port = split_address(route.listen, listening=True)
            server = Resolver(route.server)
            listener = _listen("0.0.0.0" if host == "*" else host, port)  # noqa: S104 - as asked
        except LocalError as error:
            raise AddressError(str(error)) from None
        except OSError as error:
            raise AddressError(f"cannot listen on {route.listen}: {describe(error)}") from None
        self._ports.append(_Port(route, listener, server))
        self._accept_from(self._ports[-1])
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    def carried(self) -> tuple[int, int, int]:
        """Return bytes up (to servers) and down since the start, and bytes held now."""
        pairs = [(*self._ended, 0), *(pair.carried() for pair in self._pairs.values())]
        up, down, held = map(sum, zip(*pairs, strict=True))
        return up, down, held

    def note(self, name: str, **fields: Any) -> None:
        """Write a line into the journal, if there is one."""
        if self._journal is not None:
            self._journal.note(name, self._loop.time(), **fields)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, until `aclose` at the latest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Raised in a callback, a bug's exception reaches the loop's exception handler.
        task.add_done_callback(lambda task: task.cancelled() or task.result())

    async def drain(self) -> None:
        """Stop accepting, and wait until no bytes move, at most `DRAIN_S`."""
        self.stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not self._admission.may_end(*self.carried()):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(DRAIN_LOOK_S)

    def stop_listening(self) -> None:
        """Close the ports; connections stay open."""
        for port in self._ports:
            if port.listener.fileno() >= 0:
                self._loop.remove_reader(port.listener.fileno())
                port.listener.close()

    async def aclose(self) -> None:
        """Close everything at once."""
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pair in self._pairs.values():  # their tasks had not begun
            pair.close()
        for port in self._ports:
            port.server.close()
        self._pipes.close()

    def _accept_from(self, port: _Port) -> None:
        if port.listener.fileno() >= 0:
            self._loop.add_reader(port.listener.fileno(), self._accept, port)

    def _accept(self, port: _Port) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                client, place = port.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no file descriptor is left: the kernel keeps connections waiting
                self._loop.remove_reader(port.listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_from, port)
                return
            self.accepted += 1
            address = _address_of(str(place[0]))
            refusal = self._admission.accept(address)
            if refusal:  # not in the journal, which a flood must not fill
                client.close()
                self.dropped[Drop.FULL] += 1
                self._warn_once("full", f"a connection is refused: {refusal}")
                continue
            self._pairs[self.accepted] = Pair(
                client,
                port.server,
                self._pipes,
                requires_curve=port.route.requires_curve,
                dialed=functools.partial(self._dialed, port.route.server),
            )
            self.note(
                "connection_accepted",
                connection=self.accepted,
                server=port.route.server,
                address=address,
            )
            self.start(self._serve(self.accepted, address))

    async def _serve(self, connection: int, address: str) -> None:
        pair, drop, reason = self._pairs[connection], "", ""
        try:
            reason = await pair.run()
        except Dropped as why:
            drop, reason = why.args
        finally:
            del self._pairs[connection]
            self._admission.end(address)
            up, down, _ = pair.carried()
            self._ended = self._ended[0] + up, self._ended[1] + down
            pair.close()
        self.note(
            "connection_ended", connection=connection, drop=drop, reason=reason, up=up, down=down
        )
        if drop:
            self.dropped[drop] += 1
        if drop == Drop.UNENCRYPTED:
            text = (
                f"a client at {address} does not encrypt: its address must end in ?key=...,"
                " as in the line that was printed here"
            )
            self._warn_once(drop, text)

    def _dialed(self, server: str, problem: str) -> None:
        """Report when a server becomes unreachable, and when it is reachable again."""
        if bool(problem) == (server in self._unreachable):
            return
        self._unreachable ^= {server}
        if problem:
            text = f"cannot reach {server}: {problem}; it is dialed for each client that connects"
            self._tell(Note(text, "warning"))
        else:
            self._tell(Note(f"{server} is reached again"))

    def _warn_once(self, topic: str, text: str) -> None:
        """Warn once until the next report: repeated connections must not fill the log."""
        if topic not in self._warned:
            self._warned.add(topic)
            self._tell(Note(text, "warning"))

    def _tell(self, note: Note) -> None:
        self.note("note", text=note.text, level=note.level, **note.facts)
        self._say(note)

    async def _report(self) -> None:
        """Report how many bytes passed since the last report, if any."""
        last = (0, 0, 0)
        while True:
            await asyncio.sleep(REPORT_S)
            self._warned.clear()
            before, (up, down, _), dropped = last, self.carried(), self.dropped.total()
            last = (up, down, dropped)
            if last == before:
                continue
            connections, addresses = self._admission.connections, self._admission.addresses
            text = (
                f"{counted(connections, 'connection')} of"
                f" {addresses} {'address' if addresses == 1 else 'addresses'},"
                f" {megabytes(up - before[0])} up and {megabytes(down - before[1])} down"
                f" in the last {REPORT_S:g} s"
            )
            if dropped > before[2]:
                kinds = sorted(self.dropped.items())
                text += "; dropped so far: " + ", ".join(f"{count} {kind}" for kind, count in kinds)
            facts: dict[str, int | float | str] = {
                "connections": connections,
                "addresses": addresses,
                "up": up,
                "down": down,
                "dropped": dropped,
            }
            self._tell(Note(text, facts=facts))


def _address_of(host: str) -> str:
    """Return the address that limits count by: a host may have a full /64 of IPv6 addresses."""
    place = address_prefix(host) or host
    return f"{place}::/64" if ":" in place else place


def _listen(host: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listener = socket.create_server(place, family=family, backlog=1024, dualstack_ipv6=dual)
    listener.setblocking(False)
    return listener


JOURNAL: Final = "journal.jsonl"
MOST_CONNECTIONS: Final = 4096
LEAST_CONNECTIONS: Final = 16
"""One address gets half of them, and a client has two connections, more on a long path."""
COMFORTABLE_CONNECTIONS: Final = 1024
"""With fewer, the start reports how many clients fit."""
_FILES_OF_A_CONNECTION: Final = 2
_OTHER_FILES: Final = 64 + PIPE_FILES


@frozen
class Summary:
    """The result of a relay."""

    connections: int
    bytes_up: int
    bytes_down: int
    dropped: dict[str, int]
    reason: str
    seconds: float


def connections_allowed() -> int:
    """Return how many connections fit into the limit of open files, raised as far as possible."""
    return max(1, min(MOST_CONNECTIONS, (descriptors() - _OTHER_FILES) // _FILES_OF_A_CONNECTION))


def checked_connections() -> int:
    """Return `connections_allowed`; raises UsageError if these are too few for a client."""
    found = connections_allowed()
    if found < LEAST_CONNECTIONS:
        needed = LEAST_CONNECTIONS * _FILES_OF_A_CONNECTION + _OTHER_FILES
        raise UsageError(
            f"too few open files are allowed for a relay: raise the limit to {needed} or more"
            f" (ulimit -n {needed}); each client takes four or more"
        )
    return found


def serve(
    routes: Sequence[Route],
    *,
    run_dir: Path | None,
    announce: Callable[[list[tuple[str, int]]], None],
    tell: Callable[[Note], None],
    stop: Stopper,
) -> Summary:
    """Forward until `stop` is asked. Blocks; makes its own loop.

    announce: called with host and port of each route once clients can connect. tell: takes notes
    for the operator. Raises AddressError (a port in use) and RunDirError, each in one line.
    """
    if run_dir is None:
        return run_loop(_serve(routes, None, announce, tell, stop))
    try:
        journal = JournalWriter(run_dir / JOURNAL)
    except OSError as error:
        raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
    try:
        return run_loop(_serve(routes, journal, announce, tell, stop))
    finally:
        journal.close()


async def _serve(
    routes: Sequence[Route],
    journal: JournalWriter | None,
    announce: Callable[[list[tuple[str, int]]], None],
    tell: Callable[[Note], None],
    stop: Stopper,
) -> Summary:
    loop, begun = asyncio.get_running_loop(), time.monotonic()
    asked, ended = asyncio.Event(), asyncio.Event()
    defects: list[BaseException] = []

    def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # An exception in a callback is a bug: end with it instead of forwarding in part.
        defects.append(context.get("exception") or RuntimeError(context["message"]))
        ended.set()

    def stop_asked(hard: bool) -> None:
        loop.call_soon_threadsafe((ended if hard else asked).set)

    async def drain() -> None:
        await asked.wait()
        relay.note("drain_asked", reason=stop.reason)
        await relay.drain()
        ended.set()

    loop.set_exception_handler(broken)
    relay = Relay(Admission(connections_allowed()), journal, tell)
    relay.start(drain())
    unsubscribe = stop.subscribe(stop_asked)
    try:
        bound = [relay.listen(route) for route in routes]
        relay.note(
            "node_started",
            role="relay",
            routes=[f"{one.listen} -> {one.server}" for one in routes],
            pid=os.getpid(),
            host=socket.gethostname(),
            connections=connections_allowed(),
        )
        announce(bound)
        await ended.wait()
    finally:
        unsubscribe()
        up, down, _ = relay.carried()
        await relay.aclose()
        relay.note("node_ended", up=up, down=down)
    if defects:
        raise defects[0]
    seconds = round(time.monotonic() - begun, 3)
    return Summary(relay.accepted, up, down, dict(relay.dropped), stop.reason, seconds)

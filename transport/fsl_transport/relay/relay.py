"""The sockets of a relay: lines, that is, a connection that came in and the twin that was dialled for it.

Only carries out. Who gets a line, when it is dialled, carried and dropped, decides the owner (``fsl_async/roles/relay/relay.py``), who is told:

    accepted(line, door, source)   somebody connected from there (``gate.place_of``); answer with greet or drop
    signed(line)                   the first ten bytes are ZeroMQ's; answer with dial or drop
    greeted(line, mechanism)       the greeting is whole ("" when it is none of ZeroMQ's); drop, or let it pass
    dialled(line)                  the twin stands; answer with carry or drop
    answered(line)                 the server has said something: it runs
    undialled(line, reason)        it does not; dial again, or drop
    ended(line, reason, up, down)  the line is gone; the last word about it

Bytes are looked at up to the end of the greeting (``greeting.py``), which is in plain sight; all after it passes through ``hose.py``
unread. A door is a listening port with the server behind it. ``up`` is from the client to the server. Everything happens on the loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from typing import Final, Protocol

from attrs import frozen

from fsl_transport.errors import LocalError
from fsl_transport.relay import socket_memory as weight
from fsl_transport.relay import zmtp_greeting as greeting
from fsl_transport.relay.buffer import TankPool
from fsl_transport.relay.forwarder import Hose
from fsl_transport.relay.resolver import Lookup, words
from fsl_transport.session.access_control import place_of
from fsl_transport.zmq.link import split_address

CONNECT_S: Final = 5.0
LINGER_S: Final = 1.0
"""After one side has ended: the other one's last words and its own end may take this long."""
LEAVE_S: Final = 10.0
"""Then they take what is left, or for so long nothing of it. In that case it is dropped: what is left to the kernel is weighed by nobody."""
LEAVE_MOST_S: Final = 60.0
"""And so it is after that, whoever takes a byte now and then."""
_ACCEPTS_PER_TURN: Final = 32
_PAUSE_S: Final = 0.2
_LOOK_S: Final = 0.2
_NOTHING_IS_LEFT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER, with which closing drops what was not sent, and says so to the other end."""
_KEEPALIVE: Final = (
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 60_000),
)


@frozen
class Carried:
    """What one line has carried so far, in bytes; what of that the server and the client have taken, where the system says it; what waits in this process for them."""

    line: int
    up: int
    down: int
    taken_up: int
    taken_down: int
    held_up: int
    held_down: int


class Owner(Protocol):
    """Who decides; see the module."""

    def accepted(self, line: int, door: int, source: str) -> None: ...  # noqa: D102
    def signed(self, line: int) -> None: ...  # noqa: D102
    def greeted(self, line: int, mechanism: str) -> None: ...  # noqa: D102
    def dialled(self, line: int) -> None: ...  # noqa: D102
    def answered(self, line: int) -> None: ...  # noqa: D102
    def undialled(self, line: int, reason: str) -> None: ...  # noqa: D102
    def ended(self, line: int, reason: str, up: int, down: int) -> None: ...  # noqa: D102


class _Line:
    """One connection and its twin."""

    __slots__ = (
        "awaits_answer", "client", "dialling", "door", "is_sniffing", "linger", "number", "passed", "seen", "server", "to_client", "to_server", "why",
    )  # fmt: skip

    def __init__(self, number: int, door: int, client: socket.socket) -> None:
        self.number = number
        self.door = door
        self.client = client
        self.server: socket.socket | None = None
        self.seen = bytearray()  # of the client's greeting
        self.passed = 0  # of those, sent on
        self.is_sniffing = False
        self.awaits_answer = False
        self.why = ""  # it ends
        self.dialling: asyncio.Task[None] | None = None
        self.linger: asyncio.TimerHandle | None = None
        self.to_server: Hose | None = None
        self.to_client: Hose | None = None

    @property
    def ends(self) -> list[socket.socket]:
        """Its sockets."""
        return [end for end in (self.client, self.server) if end is not None]

    @property
    def hoses(self) -> list[Hose]:
        """What carries between them."""
        return [hose for hose in (self.to_server, self.to_client) if hose is not None]

    def weigh(self) -> int:
        """Bytes of memory that it holds."""
        return sum(map(weight.of, self.ends)) + sum(hose.weight for hose in self.hoses)

    def carried(self) -> Carried:
        up, down = self.to_server, self.to_client
        carried_up = self.passed + (up.carried if up else 0)
        carried_down = down.carried if down else 0
        return Carried(
            self.number,
            carried_up,
            carried_down,
            carried_up - (weight.unsent(self.server) if self.server else 0),
            carried_down - weight.unsent(self.client),
            up.held if up else 0,
            down.held if down else 0,
        )


class _Door:
    """A listening socket and the place behind it."""

    def __init__(self, listener: socket.socket, upstream: str) -> None:
        self.listener = listener
        self.behind = Lookup(upstream)


class Switchboard:
    """All doors and lines of one relay. Make it inside a running loop."""

    def __init__(self, owner: Owner) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._pool = TankPool()
        self._doors: list[_Door] = []
        self._lines: dict[int, _Line] = {}
        self._last = 0
        self._is_listening = True
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused_by_system = 0
        """Connections that waited because this process had no file descriptor for them."""

    def open_door(self, address: str, upstream: str) -> tuple[str, int]:
        """Listen at ``host:port`` for connections that belong to ``upstream``; returns host and port. ``LocalError`` when that cannot be."""
        host, port = split_address(address, listening=True)
        listener = _listen(address, "0.0.0.0" if host == "*" else host, port)  # noqa: S104 - as asked
        try:
            self._doors.append(_Door(listener, upstream))
        except LocalError:
            listener.close()
            raise
        self._loop.add_reader(listener.fileno(), self._accept, len(self._doors) - 1)
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    def stop_listening(self) -> None:
        """Close the doors; lines go on."""
        self._is_listening = False
        for door in self._doors:
            if door.listener.fileno() >= 0:
                self._loop.remove_reader(door.listener.fileno())
                door.listener.close()

    def greet(self, line: int) -> None:
        """Read who it is."""
        found = self._lines.get(line)
        if found is not None:
            self._sniff(found, on=True)

    def dial(self, line: int) -> None:
        """Connect to the server behind the line's door."""
        found = self._lines.get(line)
        if found is not None:
            found.dialling = self._loop.create_task(self._dial(found))
            self._tasks.add(found.dialling)
            found.dialling.add_done_callback(self._tasks.discard)

    def carry(self, line: int) -> None:
        """Let bytes pass."""
        found = self._lines.get(line)
        if found is None or found.server is None:
            return
        found.to_client = Hose(
            self._loop,
            self._pool,
            found.server,
            found.client,
            lambda error: self._hose_ended(found, "the server", error),
        )
        self._await_answer(found, on=True)
        self._sniff(found, on=True)
        self._pass(found, greeting.OPEN_BYTES)

    def drop(self, line: int, reason: str) -> None:
        """End a line now, with all that waits on it."""
        found = self._lines.get(line)
        if found is not None:
            self._finish(found, reason)

    def carried(self) -> list[Carried]:
        """What every line has carried."""
        return [line.carried() for line in self._lines.values()]

    def weigh(self) -> list[tuple[int, int]]:
        """``(line, bytes)`` of memory that each line holds, here and in the kernel for its sockets; those that hold nothing are left out."""
        found = ((line.number, line.weigh()) for line in self._lines.values())
        return [(number, held) for number, held in found if held]

    async def aclose(self) -> None:
        """End everything without a word."""
        self.stop_listening()
        for line in list(self._lines.values()):
            self._close(line)
        self._lines.clear()
        for door in self._doors:
            door.behind.close()
        self._pool.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Doors.

    def _accept(self, number: int) -> None:
        door = self._doors[number]
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                client, place = door.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # out of file descriptors: who waits is accepted later
                self.refused_by_system += 1
                self._loop.remove_reader(door.listener.fileno())
                self._loop.call_later(_PAUSE_S, self._listen_again, number)
                return
            client.setblocking(False)
            _tune(client)
            self._last += 1
            line = self._lines[self._last] = _Line(self._last, number, client)
            self._owner.accepted(line.number, number, _source_of(str(place[0])))

    def _listen_again(self, number: int) -> None:
        if self._is_listening:
            self._loop.add_reader(self._doors[number].listener.fileno(), self._accept, number)

    async def _dial(self, line: _Line) -> None:
        behind = self._doors[line.door].behind
        places = await behind.places()
        reason = behind.problem
        try:
            for family, place in places:
                server = socket.socket(family, socket.SOCK_STREAM)
                server.setblocking(False)
                try:
                    await asyncio.wait_for(self._loop.sock_connect(server, place), CONNECT_S)
                except BaseException as error:
                    server.close()
                    if not isinstance(error, OSError | TimeoutError):
                        raise
                    reason = words(error)
                    continue
                if line.number not in self._lines:  # wait_for may swallow that it was cancelled
                    server.close()
                    return
                if not _stands(server) or server.getsockname() == server.getpeername():
                    # On one machine, with nobody listening, a connection can be with itself.
                    server.close()
                    reason = "connection refused"
                    continue
                _tune(server)
                line.server = server
                line.dialling = None
                self._owner.dialled(line.number)
                return
        except OSError as error:
            reason = words(error)
        line.dialling = None
        self._owner.undialled(line.number, reason)

    # Lines.

    def _sniff(self, line: _Line, *, on: bool) -> None:
        if on != line.is_sniffing:
            line.is_sniffing = on
            if on:
                self._loop.add_reader(line.client.fileno(), self._read_greeting, line)
            else:
                self._loop.remove_reader(line.client.fileno())

    def _await_answer(self, line: _Line, *, on: bool) -> None:
        if on != line.awaits_answer and line.server is not None:
            line.awaits_answer = on
            if on:
                self._loop.add_reader(line.server.fileno(), self._answered, line)
            else:
                self._loop.remove_reader(line.server.fileno())

    def _answered(self, line: _Line) -> None:
        """A connection stands as soon as the server's system takes it; only now the server itself has."""
        self._await_answer(line, on=False)
        self._owner.answered(line.number)
        if line.to_client is not None and not line.to_client.is_over:
            line.to_client.start()

    def _read_greeting(self, line: _Line) -> None:
        """Until the line is carried read the signature only, then the rest."""
        seen = line.seen
        wanted = greeting.SIGNATURE_BYTES if line.server is None else greeting.GREETING_BYTES
        try:
            data = line.client.recv(wanted - len(seen))
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(line, f"the client: {words(error)}")
            return
        if not data:
            self._finish(line, "the client closed it")
            return
        seen += data
        if len(seen) < wanted:
            if line.server is not None:
                self._pass(line, greeting.OPEN_BYTES)
            return
        self._sniff(line, on=False)
        if line.server is None:
            if greeting.is_signature(seen):
                self._owner.signed(line.number)
            else:
                self._owner.greeted(line.number, "")
            return
        self._owner.greeted(line.number, greeting.mechanism_of(seen))
        if line.number in self._lines and self._pass(line, greeting.GREETING_BYTES):
            line.to_server = Hose(
                self._loop,
                self._pool,
                line.client,
                line.server,
                lambda error: self._hose_ended(line, "the client", error),
            )
            line.to_server.start()

    def _pass(self, line: _Line, limit: int) -> bool:
        """Send the greeting on, up to byte ``limit``. A fresh connection takes 64 bytes."""
        assert line.server is not None
        part = line.seen[line.passed : limit]
        try:
            sent = line.server.send(part) if part else 0
        except OSError as error:
            self._finish(line, f"the server: {words(error)}")
            return False
        line.passed += sent
        if sent < len(part):
            self._finish(line, "the server does not take a greeting")
            return False
        return True

    def _hose_ended(self, line: _Line, side: str, error: OSError | None) -> None:
        """One direction is over. The other one may have last words on their way, also where it was an error."""
        line.why = line.why or (f"{side} closed it" if error is None else words(error))
        other = line.to_client if side == "the client" else line.to_server
        target = line.server if side == "the client" else line.client
        if other is None or other.is_over or target is None:
            self._leave(line)
            return
        _shut(target)
        line.linger = self._loop.call_later(LINGER_S, self._leave, line)

    def _leave(self, line: _Line) -> None:
        """Read no more, and end when what was written is delivered."""
        if line.linger is not None:
            line.linger.cancel()
        self._sniff(line, on=False)
        self._await_answer(line, on=False)
        for hose in line.hoses:
            hose.close()
        for end in line.ends:
            _shut(end)
        self._look_whether_delivered(line, math.inf, 0.0, self._loop.time() + LEAVE_MOST_S)

    def _look_whether_delivered(
        self, line: _Line, before: float, ends_at: float, at_last: float
    ) -> None:
        unsent = sum(weight.unsent(end) for end in line.ends if _stands(end))
        now = self._loop.time()
        if unsent < before:
            ends_at = min(now + LEAVE_S, at_last)
        if unsent and now < ends_at:
            line.linger = self._loop.call_later(
                _LOOK_S, self._look_whether_delivered, line, unsent, ends_at, at_last
            )
        else:
            self._finish(line, line.why)

    def _finish(self, line: _Line, reason: str) -> None:
        if self._lines.pop(line.number, None) is None:
            return
        carried = line.carried()
        for end in line.ends:
            if weight.unsent(end):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOTHING_IS_LEFT)
        self._close(line)
        self._owner.ended(line.number, reason, carried.up, carried.down)

    def _close(self, line: _Line) -> None:
        if line.linger is not None:
            line.linger.cancel()
        if line.dialling is not None:
            line.dialling.cancel()
        for hose in line.hoses:
            hose.close()
        self._sniff(line, on=False)
        self._await_answer(line, on=False)
        for end in line.ends:
            end.close()


def _source_of(host: str) -> str:
    """Whom a host may belong to, for limits and for people."""
    place = place_of(host) or host
    return f"{place}::/64" if ":" in place else place


def _listen(address: str, host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(1024)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise LocalError(f"cannot listen on {address}: {words(error)}") from None
    return listener


def _tune(connection: socket.socket) -> None:
    """No waiting for more bytes to send, and an end when the other machine is gone."""
    with contextlib.suppress(OSError):  # a connection that broke meanwhile
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            number = getattr(socket, name, None)
            if number is not None:
                connection.setsockopt(socket.IPPROTO_TCP, number, value)
        if hasattr(socket, "TCP_CONGESTION") and _stays_here(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _shut(connection: socket.socket) -> None:
    """Say that nothing more will be sent."""
    with contextlib.suppress(OSError):  # it is broken
        connection.shutdown(socket.SHUT_WR)


def _stands(connection: socket.socket) -> bool:
    """Whether it is a connection still. Of one that was reset Linux goes on saying what was not sent."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _stays_here(connection: socket.socket) -> bool:
    """Whether both ends are on this machine's loopback."""
    host = str(connection.getpeername()[0])
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"

"""What strangers do to a listener, over real sockets, with ZMTP written by hand. Each attack is a generator: one step a `next`.

ZMTP 3.0 (RFC 23): a greeting of 64 bytes, a READY command with socket type and identity, then frames with one byte of flags
(1 more, 2 long, 4 command) and a length of one or eight bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgpack

from fsl_async.shells.wire import Hello
from fsl_transport import frames

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
HANDS_S = 5.0
"""How long a busy server may take to answer, or to take what is sent."""
MADE: list[socket.socket] = []
"""All connections of this process, to be closed in the end."""


def dial(address: str) -> socket.socket:
    """A connection that never blocks for long."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    found = socket.create_connection((host, int(port)), timeout=5)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.settimeout(HANDS_S)
    MADE.append(found)
    return found


def part(data: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """One ZMTP frame."""
    flags = (1 if more else 0) | (4 if command else 0)
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return bytes((flags | 2,)) + struct.pack(">Q", len(data)) + data


def ready(identity: bytes) -> bytes:
    """The READY command of a DEALER."""
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return part(
        b"\x05READY" + kind + b"\x08Identity" + struct.pack(">I", len(identity)) + identity,
        command=True,
    )


def enter(address: str, name: str, lane: str = "c") -> socket.socket:
    """A connection whose handshake is done, at both sides: libzmq hangs up on who says more before it has said READY itself."""
    found = dial(address)
    found.sendall(GREETING + ready(f"{name}/{lane}/{os.urandom(4).hex()}".encode()))
    _exactly(found, len(GREETING))
    _, size = _exactly(found, 2)  # READY, of less than 256 bytes
    _exactly(found, size)
    return found


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("hung up in the handshake")
        data += more
    return data


def hello(name: str, incarnation: int = 1) -> bytes:
    """A HELLO as a client says it."""
    body = Hello("", -1, "", -1).to_wire()
    version = frames.PROTOCOL_VERSION
    return msgpack.packb([frames.HELLO, version, incarnation, 1, name, "client", body])


class _Reader:
    """Messages of one connection, heads only."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def head(self) -> list[object]:
        """The next message's first frame."""
        while True:
            found = self._frame()
            if found is None:
                data = self._connection.recv(1 << 16)
                if not data:
                    raise OSError("hung up")
                self._data += data
                continue
            flags, content = found
            if not flags & 4:
                return list(msgpack.unpackb(content))

    def _frame(self) -> tuple[int, bytes] | None:
        if not self._data or (self._data[0] & 2 and len(self._data) < 9):
            return None
        return self._cut(8 if self._data[0] & 2 else 1)

    def _cut(self, width: int) -> tuple[int, bytes] | None:
        size = int.from_bytes(self._data[1 : 1 + width], "big")
        if len(self._data) < 1 + width or len(self._data) < 1 + width + size:
            return None
        flags, content = self._data[0], bytes(self._data[1 + width : 1 + width + size])
        del self._data[: 1 + width + size]
        return flags, content


def session_of(address: str, name: str) -> tuple[socket.socket, bytes]:
    """A crook that was admitted: its connection and its session."""
    connection = enter(address, name)
    connection.sendall(part(hello(name)))
    reader = _Reader(connection)
    while True:
        head = reader.head()
        if head[0] == frames.WELCOME:
            return connection, bytes(head[4])  # type: ignore[call-overload]
        if head[0] == frames.REFUSE:
            raise OSError(f"refused: {head[5]}")


def slow_loris(address: str) -> Iterator[None]:
    """200 connections that say a byte of their greeting now and then."""
    held = [dial(address) for _ in range(200)]
    for index in itertools.count():
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(GREETING[index % 60 : index % 60 + 1])
        time.sleep(0.05)
        yield


def half_open(address: str) -> Iterator[None]:
    """3,000 connections that never say anything."""
    held: list[socket.socket] = []
    while len(held) < 3000:
        for _ in range(50):
            with contextlib.suppress(OSError):
                held.append(dial(address))
        yield
    while True:
        time.sleep(0.05)
        yield


def half_greeting(address: str) -> Iterator[None]:
    """Connections that stop in the middle of the ZMTP greeting, or after it; made anew when they are hung up."""
    held: list[socket.socket] = []
    for index in itertools.count():
        with contextlib.suppress(OSError):
            connection = dial(address)
            connection.sendall(GREETING[: (10, 32, 64)[index % 3]])
            held.append(connection)
        if len(held) > 500:
            held.pop(0).close()
        yield


def oversized(address: str) -> Iterator[None]:
    """Frames that claim 2^40 bytes, and heads of megabytes from somebody without a session."""
    for index in itertools.count():
        with contextlib.suppress(OSError), enter(address, f"big-{index % 50}") as connection:
            connection.sendall(b"\x02" + struct.pack(">Q", 1 << 40))
            connection.sendall(bytes(1 << 16))
        with contextlib.suppress(OSError), enter(address, f"huge-{index % 50}") as connection:
            connection.sendall(part(bytes((0xDD, 0, 1, 0xFF, 0xFF)) * 600_000))
        yield


def fresh_names(address: str) -> Iterator[None]:
    """HELLOs under names that nobody had before, each on a connection of its own, some left open."""
    held: list[socket.socket] = []
    for index in itertools.count():
        with contextlib.suppress(OSError):
            name = f"fresh-{index}-{os.urandom(2).hex()}"
            connection = enter(address, name)
            connection.sendall(part(hello(name)))
            held.append(connection)
        if len(held) > 300:
            held.pop(0).close()
        yield


def replayed(address: str) -> Iterator[None]:
    """An honest client's HELLO and messages of a session, again and again, in any order, from another connection."""
    connection = enter(address, "client-00")
    said = [
        hello("client-00"),
        hello("client-00", 1 << 62)[:-3],
        msgpack.packb([frames.DATA, bytes(8), 1, 0, frames.MESSAGE, {"m": "Fetch"}]),
        msgpack.packb([frames.BYE, bytes(8), "gone"]),
        msgpack.packb([frames.BEAT, bytes(8), 0, True, {}]),
    ]
    for index in itertools.count():
        try:
            connection.sendall(b"".join(part(said[(index + n * n) % len(said)]) for n in range(20)))
        except OSError:
            with contextlib.suppress(OSError):
                connection = enter(address, "client-00")
        yield


def fast_speaker(address: str) -> Iterator[None]:
    """A peer with a session says what it may say, twice, out of order and as fast as it can; and sends chunks that nobody accepted."""
    connection, session = session_of(address, "crook")
    bulk = enter(address, "crook", "b")
    seq = 0
    skip = {"m": "Skip", "round": 1, "reason": "x" * 1000}
    early = bytes(1 << 18)
    for index in itertools.count():
        numbers = (seq + 2, seq + 1, seq + 1, seq + 2, seq + 2)
        said = [[frames.DATA, session, number, 0, frames.MESSAGE, skip] for number in numbers]
        said.append([frames.BEAT, session, 0, True, {"step": index}])
        out = [part(msgpack.packb(one)) for one in said]
        seq += 2
        chunk = msgpack.packb([frames.CHUNK, session, 1 + index % 60, 0, index])
        try:
            connection.sendall(b"".join(out) * 5)
            bulk.sendall(part(chunk, more=True) + part(early))
        except OSError:
            with contextlib.suppress(OSError):
                connection, session = session_of(address, "crook")
                bulk, seq = enter(address, "crook", "b"), 0
        yield


ATTACKS: dict[str, Callable[[str], Iterator[None]]] = {
    "slow loris": slow_loris,
    "half open": half_open,
    "half greeting": half_greeting,
    "oversized": oversized,
    "fresh names": fresh_names,
    "replayed": replayed,
    "fast speaker": fast_speaker,
}


class Attack(threading.Thread):
    """Runs one until it is told to stop; `steps` says how far it came, `problem` why it ended before."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name=name, daemon=True)
        self.steps = 0
        self.problem = ""
        self._generator = ATTACKS[name](address)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Attack."""
        try:
            while not self._stopping.is_set():
                next(self._generator)
                self.steps += 1
        except OSError as error:
            self.problem = str(error)

    def stop(self) -> None:
        """End it, and its connections."""
        self._stopping.set()
        self.join(10)
        self._generator.close()  # type: ignore[attr-defined]
        while MADE:
            MADE.pop().close()

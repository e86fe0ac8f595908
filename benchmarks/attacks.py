"""Attacks on a listener, over real sockets, with ZMTP written by hand.

Each attack is a generator: one step for each `next`. ZMTP 3.0 (RFC 23): a greeting of 64 bytes, a
READY command with socket type and identity, then frames with one byte of flags (1 more, 2 long, 4
command) and a length of one or eight bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
from attrs import field, frozen

from fsl_async.nodes.wire import Hello
from fsl_transport.session import frames
from fsl_transport.session.frames import trailer

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
HANDS_S = 5.0
"""Time a busy server may take to answer or to receive, in seconds."""
MADE: list[socket.socket] = []
"""All connections of this process, closed at the end."""


@frozen
class Recording:
    """What an honest client sent, as an eavesdropper has it: (lane "c" or "b", frames) in order."""

    name: str = ""
    sent: list[tuple[str, list[bytes]]] = field(factory=list)

    MOST = 256
    """Messages: the HELLO and what follows it."""

    @property
    def session(self) -> bytes:
        """The session's id, which every message but a HELLO holds."""
        heads = (msgpack.unpackb(parts[0]) for _, parts in self.sent)
        return next(bytes(head[1]) for head in heads if head[0] != frames.HELLO)


def record(link: Any, name: str) -> Recording:
    """Record what is sent on a dialer's link from now on."""
    made = Recording(name)
    send = link.send

    def both(peer: str, lane: int, parts: Sequence[Any], *rest: Any, **more: Any) -> None:
        if len(made.sent) < made.MOST:
            made.sent.append(("b" if lane else "c", [bytes(part) for part in parts]))
        send(peer, lane, parts, *rest, **more)

    link.send = both
    return made


def dial(address: str) -> socket.socket:
    """Return a connection whose calls never block for long."""
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


def message(parts: Sequence[bytes]) -> bytes:
    """The ZMTP frames of a message with this head, or head and payload, as a dialer sends them."""
    whole = [*parts, trailer(parts[0])] if len(parts) > 1 else parts
    return b"".join(part(one, more=one is not whole[-1]) for one in whole)


def ready(identity: bytes) -> bytes:
    """The READY command of a DEALER."""
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return part(
        b"\x05READY" + kind + b"\x08Identity" + struct.pack(">I", len(identity)) + identity,
        command=True,
    )


def new_tag() -> str:
    """A tag that the lanes of one dialer share."""
    return os.urandom(4).hex()


def enter(address: str, name: str, lane: str = "c", tag: str = "") -> socket.socket:
    """Return a connection whose handshake is done at both sides.

    libzmq closes a connection that sends more before libzmq has sent its own READY.
    """
    found = dial(address)
    found.sendall(GREETING + ready(f"{name}/{lane}/{tag or new_tag()}".encode()))
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
    """A HELLO as a client sends it."""
    body = Hello("", -1, "", -1).to_wire()
    version = frames.PROTOCOL_VERSION
    return msgpack.packb([frames.HELLO, version, incarnation, 1, name, "client", body])


class _Reader:
    """Messages of one connection, heads only."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self._acknowledged = 0

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

    def acknowledged(self) -> int:
        """How much of what was sent here the listener has acknowledged so far; does not wait."""
        self._connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := self._connection.recv(1 << 16):
                self._data += data
        self._connection.settimeout(HANDS_S)
        while (found := self._frame()) is not None:
            flags, content = found
            head = [] if flags & 4 else msgpack.unpackb(content)
            if head and head[0] in {frames.BEAT, frames.ACK, frames.DATA}:
                self._acknowledged = int(head[3 if head[0] == frames.DATA else 2])
        return self._acknowledged

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


class Attacker:
    """An admitted attacker: both its connections, its session, and the last number acknowledged."""

    def __init__(self, address: str, name: str) -> None:
        tag = new_tag()
        self.control = enter(address, name, "c", tag)
        self.control.sendall(part(hello(name)))
        self._reader = _Reader(self.control)
        while (head := self._reader.head())[0] != frames.WELCOME:
            if head[0] == frames.REFUSE:
                raise OSError(f"refused: {head[5]}")
        self.session = bytes(head[4])  # type: ignore[call-overload]
        self.bulk = enter(address, name, "b", tag)
        self.acknowledged_seq = 0

    def look(self) -> None:
        """Read what the listener sends."""
        self.acknowledged_seq = self._reader.acknowledged()


def slow_loris(address: str) -> Iterator[None]:
    """200 connections that send a byte of their greeting now and then."""
    held = [dial(address) for _ in range(200)]
    for index in itertools.count():
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(GREETING[index % 60 : index % 60 + 1])
        time.sleep(0.05)
        yield


def half_open(address: str) -> Iterator[None]:
    """3,000 connections that never send anything."""
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
    """Connections that stop in or after the ZMTP greeting; opened again when they are closed."""
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
    """Frames that claim 2^40 bytes, and heads of megabytes from a peer without a session."""
    for index in itertools.count():
        with contextlib.suppress(OSError), enter(address, f"big-{index % 50}") as connection:
            connection.sendall(b"\x02" + struct.pack(">Q", 1 << 40))
            connection.sendall(bytes(1 << 16))
        with contextlib.suppress(OSError), enter(address, f"huge-{index % 50}") as connection:
            connection.sendall(part(bytes((0xDD, 0, 1, 0xFF, 0xFF)) * 600_000))
        yield


def fresh_names(address: str) -> Iterator[None]:
    """HELLOs under new names, each on its own connection; some connections stay open."""
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


def replayed(address: str, recording: Recording) -> Iterator[None]:
    """Send again what an honest client sent, byte for byte, its HELLO included, in any order.

    From other connections under its name, while the client's own are up; then a BYE of its session.
    """
    if not recording.sent:
        raise ValueError("no recording to replay")
    bye = ("c", [msgpack.packb([frames.BYE, recording.session, "gone"])])
    sent = [(lane, message(parts)) for lane, parts in (*recording.sent, bye)]
    held = {lane: enter(address, recording.name, lane) for lane in "cb"}
    for index in itertools.count():
        for n in range(20):
            lane, data = sent[(index + n * n) % len(sent)]
            try:
                held[lane].sendall(data)
            except OSError:
                with contextlib.suppress(OSError):
                    held[lane] = enter(address, recording.name, lane)
        yield


EARLY_BYTES = 1 << 18
WINDOW = 64
"""Messages that may be under way."""


def control_burst(session: bytes, seq: int, index: int) -> list[list[bytes]]:
    """Control messages of a session: seq + 1 and seq + 2, twice and reordered, and a heartbeat."""
    skip = {"m": "skip/1", "round": 1, "reason": "x" * 1000}
    numbers = (seq + 2, seq + 1, seq + 1, seq + 2, seq + 2)
    sent: list[list[Any]] = [[frames.DATA, session, n, 0, frames.MESSAGE, skip] for n in numbers]
    sent.append([frames.BEAT, session, 0, True, {"step": index}])
    return [[msgpack.packb(one)] for one in sent]


def unaccepted_chunk(session: bytes, index: int) -> list[bytes]:
    """A complete chunk of one of 60 unoffered streams, as piece index + 1 of the first stripe."""
    stream, position, number = 1 + index % 60, index // 60, index + 1
    head = [frames.CHUNK, session, stream, 0, position, 0, EARLY_BYTES, 0, number, True]
    return [msgpack.packb(head), bytes(EARLY_BYTES)]


def fast_speaker(address: str) -> Iterator[None]:
    """A peer with a session sends what it may, twice, reordered, as fast as it can, and unaccepted
    chunks.

    It sends dropped messages again, as go-back-N does: the listener would otherwise look at nothing
    after the first drop.
    """
    attacker, seq, begun = Attacker(address, "attacker"), 0, 0
    for index in itertools.count():
        try:
            attacker.look()
            seq = seq if seq < attacker.acknowledged_seq + WINDOW else attacker.acknowledged_seq
            burst = b"".join(message(one) for one in control_burst(attacker.session, seq, index))
            attacker.control.sendall(burst * 5)
            attacker.bulk.sendall(message(unaccepted_chunk(attacker.session, index - begun)))
            seq += 2
        except OSError:
            with contextlib.suppress(OSError):
                attacker, seq, begun = Attacker(address, "attacker"), 0, index + 1
        yield


ATTACKS: dict[str, Callable[..., Iterator[None]]] = {
    "slow loris": slow_loris,
    "half open": half_open,
    "half greeting": half_greeting,
    "oversized": oversized,
    "fresh names": fresh_names,
    "replayed": replayed,
    "fast speaker": fast_speaker,
}


REPLAYS = ("replayed",)


class Attack(threading.Thread):
    """Runs one attack until `stop`; `steps` counts its steps, `problem` says why it ended early."""

    def __init__(self, name: str, address: str, recording: Recording | None = None) -> None:
        """recording: of the client whose messages are replayed, for the attacks in `REPLAYS`."""
        super().__init__(name=name, daemon=True)
        self.steps = 0
        self.problem = ""
        more = [recording or Recording()] if name in REPLAYS else []
        self._generator = ATTACKS[name](address, *more)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Run the attack."""
        try:
            while not self._stopping.is_set():
                next(self._generator)
                self.steps += 1
        except (OSError, ValueError) as error:
            self.problem = str(error) or type(error).__name__

    def stop(self) -> None:
        """End the attack and close its connections."""
        self._stopping.set()
        while self.is_alive():  # it may wait for a listener that no longer answers
            for connection in MADE:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.join(0.1)
        self._generator.close()  # type: ignore[attr-defined]
        while MADE:
            MADE.pop().close()

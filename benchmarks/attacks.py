"""Attacks of unauthenticated peers on a listener, over real sockets, with ZMTP written by hand.
Each attack is a
generator: one step a `next`.

ZMTP 3.0 (RFC 23): a greeting of 64 bytes, a READY command with socket type and identity, then
frames with one byte of flags (1 more, 2 long, 4 command) and a length of one or eight bytes.
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
"""How long a busy server may take to answer, or to take what is sent."""
MADE: list[socket.socket] = []
"""All connections of this process, to be closed in the end."""


@frozen
class Recording:
    """What an honest client said, as somebody who can read the line has it: lane ("c" or "b") and
    frames of each message, in order.
    """

    name: str = ""
    said: list[tuple[str, list[bytes]]] = field(factory=list)

    MOST = 256
    """Messages: the HELLO and what follows it."""

    @property
    def session(self) -> bytes:
        """The session's id, which is in all but the HELLOs."""
        heads = (msgpack.unpackb(parts[0]) for _, parts in self.said)
        return next(bytes(head[1]) for head in heads if head[0] != frames.HELLO)


def record(link: Any, name: str) -> Recording:
    """Write down what is sent on a dialer's link from now on."""
    made = Recording(name)
    send = link.send

    def both(peer: str, lane: int, parts: Sequence[Any], *rest: Any, **more: Any) -> None:
        if len(made.said) < made.MOST:
            made.said.append(("b" if lane else "c", [bytes(part) for part in parts]))
        send(peer, lane, parts, *rest, **more)

    link.send = both
    return made


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


def message(parts: Sequence[bytes]) -> bytes:
    """The ZMTP frames of a message with this head, or this head and payload, as a dialer of ours
    sends it.
    """
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
    """What the lanes of one dialer have in common."""
    return os.urandom(4).hex()


def enter(address: str, name: str, lane: str = "c", tag: str = "") -> socket.socket:
    """A connection whose handshake is done, at both sides: libzmq hangs up on who says more before
    it has said READY itself.
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
        """How far the listener has taken what was said on this connection, as far as that has come;
        waits for nothing.
        """
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


class Crook:
    """Somebody who was admitted: both its connections, its session, and how far it was heard."""

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
        self.heard = 0

    def look(self) -> None:
        """Read what the listener sends."""
        self.heard = self._reader.acknowledged()


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
    """Connections that stop in the middle of the ZMTP greeting, or after it; made anew when they
    are hung up.
    """
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
    """HELLOs under names that nobody had before, each on a connection of its own, some left
    open.
    """
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
    """What an honest client said, byte for byte, its HELLO and all under its session's id, again
    and again, in any order; and a BYE of that session.

    From other connections under its name, while the client's own stand.
    """
    if not recording.said:
        raise ValueError("nothing was recorded that could be said again")
    bye = ("c", [msgpack.packb([frames.BYE, recording.session, "gone"])])
    said = [(lane, message(parts)) for lane, parts in (*recording.said, bye)]
    held = {lane: enter(address, recording.name, lane) for lane in "cb"}
    for index in itertools.count():
        for n in range(20):
            lane, data = said[(index + n * n) % len(said)]
            try:
                held[lane].sendall(data)
            except OSError:
                with contextlib.suppress(OSError):
                    held[lane] = enter(address, recording.name, lane)
        yield


EARLY_BYTES = 1 << 18
WINDOW = 64
"""Messages that may be under way."""


def fast_words(session: bytes, seq: int, index: int) -> list[list[bytes]]:
    """Control messages of somebody with a session: number seq + 1 and seq + 2, twice and in the
    wrong order, and a heartbeat.
    """
    skip = {"m": "skip/1", "round": 1, "reason": "x" * 1000}
    numbers = (seq + 2, seq + 1, seq + 1, seq + 2, seq + 2)
    said: list[list[Any]] = [[frames.DATA, session, n, 0, frames.MESSAGE, skip] for n in numbers]
    said.append([frames.BEAT, session, 0, True, {"step": index}])
    return [[msgpack.packb(one)] for one in said]


def early_chunk(session: bytes, index: int) -> list[bytes]:
    """A whole chunk of one of 60 streams that were never offered, as piece number index + 1 of the
    first stripe.
    """
    head = [
        frames.CHUNK,
        session,
        1 + index % 60,
        0,
        index // 60,
        0,
        EARLY_BYTES,
        0,
        index + 1,
        True,
    ]
    return [msgpack.packb(head), bytes(EARLY_BYTES)]


def fast_speaker(address: str) -> Iterator[None]:
    """A peer with a session says what it may say, twice, out of order and as fast as it can; and
    sends chunks that nobody accepted.

    What the listener drops is said again, as go-back-N does: without that nothing after the first
    drop would be looked at.
    """
    crook, seq, begun = Crook(address, "crook"), 0, 0
    for index in itertools.count():
        try:
            crook.look()
            seq = seq if seq < crook.heard + WINDOW else crook.heard
            words = b"".join(message(one) for one in fast_words(crook.session, seq, index))
            crook.control.sendall(words * 5)
            crook.bulk.sendall(message(early_chunk(crook.session, index - begun)))
            seq += 2
        except OSError:
            with contextlib.suppress(OSError):
                crook, seq, begun = Crook(address, "crook"), 0, index + 1
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
    """Runs one until it is told to stop; `steps` says how far it came, `problem` why it ended
    before.
    """

    def __init__(self, name: str, address: str, recording: Recording | None = None) -> None:
        """recording: of the client whose words are said again, for those attacks that do
        (`REPLAYS`).
        """
        super().__init__(name=name, daemon=True)
        self.steps = 0
        self.problem = ""
        more = [recording or Recording()] if name in REPLAYS else []
        self._generator = ATTACKS[name](address, *more)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Attack."""
        try:
            while not self._stopping.is_set():
                next(self._generator)
                self.steps += 1
        except (OSError, ValueError) as error:
            self.problem = str(error) or type(error).__name__

    def stop(self) -> None:
        """End it, and its connections."""
        self._stopping.set()
        while self.is_alive():  # it may wait for a listener that does not answer any more
            for connection in MADE:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.join(0.1)
        self._generator.close()  # type: ignore[attr-defined]
        while MADE:
            MADE.pop().close()

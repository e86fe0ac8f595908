"""Ranks on other machines than their node. Imports no torch.

Rank 0, on the node's machine, is the proxy of each of them at the node's socket, and looks there
like any other rank:

    rank on machine B  <- TCP ->  process of rank 0 on machine A  <- Unix socket ->  node

Messages pass through. The ranks of machine A share the vectors with the node. For a rank of machine
B its parts of them travel with the message that speaks of them: what it writes (the first weights,
snapshots) before `Attached` and `Done`, what it reads (base and reference of a move, the base of
`fed.at_version`) before `Move` and `Base`. There a slot is sparse memory, in which only these parts
take pages. So a sync moves each shard three times over the cluster's network, once up and twice
down, and nothing is gathered.

A connection begins with a token, which the ranks have from torchrun's store. It is not encrypted,
like those of NCCL and gloo. Then frames of both directions are alike:

    kind u8, length u64, little-endian, then so many bytes
    MESSAGE  msgpack, by the tables of `roles.gang_messages`
    BODY     what the descriptor of the next message holds
    DATA     slot u32, first value u64, fp32 values
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]
from attrs import field, frozen

from fsl_async.learn.client.ports import Vector
from fsl_async.learn.gang.link import (
    MOST_BYTES,
    Link,
    NodeLostError,
    mapped,
    sparse,
    unpacked,
    written,
)
from fsl_async.roles import gang_messages as msg
from fsl_async.roles.messages import Message, MessageError, Table

Range = tuple[int, int]

MESSAGE, BODY, DATA = 0, 1, 2
MOST_BODY = 64 << 20
"""Bytes of a manifest, and of the ranges of a rank."""
CONNECT_S = 10.0
"""To connect to one address, and to send the token."""
RETRY_S = 0.1
LAST_S = 30.0
"""How long the last messages may take."""
SILENT_MS = 120_000
"""A machine that acknowledges nothing for so long is gone."""
SPARE = 64
"""Connections at a time beyond those of the ranks, of strangers for instance."""
_HEAD, _PLACE = struct.Struct("<BQ"), struct.Struct("<IQ")
_TOKEN_BYTES, _WELCOME = 32, b"fsl-gang"
_SMALL = 64 << 10
_BYTES = 4


class _Wire:
    """Frames on a TCP connection. One thread sends at a time, and one receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that has lost power says nothing.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Nor does it acknowledge what is under way, of which keepalive takes no notice.
        for option, value in (
            ("TCP_KEEPIDLE", 20),
            ("TCP_KEEPINTVL", 10),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", SILENT_MS),
        ):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connected
        self._lock = threading.Lock()
        self.slots: dict[int, Vector] = {}
        self.takes: frozenset[Range] | None = None
        """The parts of a slot that the other end may send; None: any."""

    def send(self, kind: int, head: bytes, data: memoryview | bytes = b"") -> None:
        """Send a frame of `head` and then `data`. Raises OSError."""
        first = _HEAD.pack(kind, len(head) + len(data)) + head
        with self._lock:
            if len(data) < _SMALL:
                self._socket.sendall(first + data)
            else:
                self._socket.sendall(first)
                self._socket.sendall(data)

    def send_parts(self, slot: int, ranges: Iterable[Range]) -> None:
        """Send parts of a slot."""
        vector = self.slots[slot]
        for start, stop in ranges:
            part = vector[start:stop].data.cast("B")
            self.send(DATA, _PLACE.pack(slot, start), part)

    def receive(self) -> tuple[int, bytes]:
        """The next message or body; data before it are put into their slots.

        Raises EOFError, OSError, and MessageError for what is none of these.
        """
        while True:
            kind, length = _HEAD.unpack(self._read(_HEAD.size))
            if kind == DATA:
                self._take(length)
            elif kind in {MESSAGE, BODY} and length <= (MOST_BODY if kind == BODY else MOST_BYTES):
                return kind, self._read(length)
            else:
                raise MessageError(f"a frame of kind {kind} with {length} bytes")

    def _take(self, length: int) -> None:
        if length < _PLACE.size:
            raise MessageError("data without a place")
        slot, start = _PLACE.unpack(self._read(_PLACE.size))
        values, rest = divmod(length - _PLACE.size, _BYTES)
        vector = self.slots.get(slot)
        if vector is None or rest or not 0 < values <= len(vector) - start:
            raise MessageError(f"data for values {start} to {start + values} of slot {slot}")
        if self.takes is not None and (start, start + values) not in self.takes:
            raise MessageError("data for a part of another rank")
        self._fill(vector[start : start + values].data.cast("B"))

    def _read(self, size: int) -> bytes:
        found = bytearray(size)
        self._fill(memoryview(found))
        return bytes(found)

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise EOFError("closed")
            into = into[count:]

    def close(self) -> None:
        """End the connection, in both directions."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _packed(message: Message, table: Table) -> bytes:
    data: bytes = msgpack.packb(table.to_wire(message))
    return data


def _parts(body: bytes) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """What a rank writes and reads, of the body of its `Attached`."""
    try:
        found: Any = msgpack.unpackb(body)
        writes, reads = (
            tuple((int(start), int(stop)) for start, stop in found[name])
            for name in ("ranges", "reads")
        )
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
        raise MessageError(f"no ranges: {error}") from None
    return writes, reads


@frozen
class _Sending:
    """A message, what its descriptor holds, and the slot whose parts go before it (-1: none)."""

    message: Message
    body: bytes = b""
    slot: int = -1
    is_sent: threading.Event = field(factory=threading.Event)


class RemoteLink:
    """A rank's connection with its node on another machine; used as `Link` is.

    Threads send and receive, so that training waits for copies only: no other order has this rank
    fill a slot before the message that speaks of its parts has arrived.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._wire = _Wire(connected)
        self._found: queue.SimpleQueue[tuple[Message, list[int]] | Exception] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._values = 0
        self._first = -1
        self._fills: dict[int, int] = {}  # directive -> the slot that it has this rank fill
        self._writes: tuple[Range, ...] = ()
        threading.Thread(target=self._receive, name="gang", daemon=True).start()
        self._sender = threading.Thread(target=self._send_all, name="gang", daemon=True)
        self._sender.start()

    @classmethod
    def dial(cls, hosts: Sequence[str], port: int, token: bytes) -> RemoteLink:
        """Connect to rank 0's machine by the first of its names that works.

        Raises NodeLostError.
        """
        errors = []
        for host in dict.fromkeys(hosts):
            try:
                connected = socket.create_connection((host, port), CONNECT_S)
            except OSError as error:
                errors.append(f"{host}: {error}")
                continue
            try:
                connected.sendall(token)
                answer, why = _exactly(connected, len(_WELCOME)), "another program answers there"
            except OSError as error:
                answer, why = b"", str(error)
            if answer == _WELCOME:
                return cls(connected)
            connected.close()
            errors.append(f"{host} port {port}: {why}")
        raise NodeLostError(
            f"this rank cannot reach rank 0, whose machine has the node: {'; '.join(errors)}"
        )

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Have a message sent, after this rank's parts of the slot that it speaks of.

        Raises OSError where the connection has ended.
        """
        if self._error is not None:
            raise self._error
        match message:
            case msg.Attached():
                body = os.pread(files[0], os.fstat(files[0]).st_size, 0)
                self._writes, _ = _parts(body)
                sending = _Sending(message, body, self._first)
            case msg.Done(number=number) if number in self._fills:
                sending = _Sending(message, slot=self._fills.pop(number))
            case _:
                sending = _Sending(message)
        if isinstance(message, msg.Shape):
            self._values = message.values
        self._to_send.put(sending)
        if isinstance(message, msg.Ended):  # this process may end now
            sending.is_sent.wait(LAST_S)

    def _send_all(self) -> None:
        while (sending := self._to_send.get()) is not None:
            try:
                if sending.body:
                    self._wire.send(BODY, sending.body)
                if sending.slot >= 0:
                    self._wire.send_parts(sending.slot, self._writes)
                self._wire.send(MESSAGE, _packed(sending.message, msg.FROM_RANKS))
            except OSError as error:
                self._error = error
                self._wire.close()  # for `receive`
            sending.is_sent.set()

    def receive(self, *, waits: bool = True) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors; None if none is there.

        Raises EOFError where the connection has ended, and MessageError, OSError.
        """
        try:
            found = self._found.get(block=waits)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            self._found.put(found)
            raise found
        return found

    def _receive(self) -> None:
        try:
            while True:
                _, data = self._wire.receive()
                message = msg.FROM_NODE.from_wire(unpacked(data))
                files = []
                match message:
                    case msg.Slots(slots=slots):
                        for slot in slots:
                            files.append(sparse(self._values))
                            self._wire.slots[slot] = mapped(os.dup(files[-1]), self._values)
                        self._first = slots[0] if self._first < 0 else self._first
                    case msg.Snapshot(slot=slot) | msg.Round(slot=slot):
                        self._fills[message.number] = slot
                self._found.put((message, files))
        except Exception as error:  # noqa: BLE001 - raised by `receive`
            self._found.put(error)

    def close(self) -> None:
        """Send what is left, and close the connection."""
        self._to_send.put(None)
        self._sender.join(LAST_S)
        self._wire.close()


class RemoteRanks:
    """The proxies of ranks on other machines, in the process of rank 0.

    name: of the node's socket. ranks: how many are elsewhere; once they are here, no other
    connection is taken. say: takes a line about a rank that breaks the protocol.
    """

    def __init__(self, name: str, ranks: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._name, self._ranks, self._say = name, ranks, say
        self._listening = _listening()
        self.port = int(self._listening.getsockname()[1])
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._threads: list[threading.Thread] = []
        self._proxies: list[_Proxy] = []
        self._slots = _SharedSlots()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="gang", daemon=True).start()

    def passed(self, number: int) -> int:
        """How many of the node's first `number` directives all ranks elsewhere have."""
        with self._lock:
            return min([number, *(one.passed for one in self._proxies)])

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, _ = self._listening.accept()
            except OSError:  # closed; or no descriptors are left, which may pass
                time.sleep(RETRY_S)
                continue
            self._threads = [one for one in self._threads if one.is_alive()]
            serve = threading.Thread(target=self._serve, args=(connected,), daemon=True)
            if len(self._threads) >= self._ranks + SPARE:
                connected.close()
                continue
            try:
                serve.start()
            except RuntimeError:  # the job may have no more threads
                connected.close()
                continue
            self._threads.append(serve)

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.closing(connected):
            try:
                said = _exactly(connected, _TOKEN_BYTES)
                if not hmac.compare_digest(said, self.token):
                    return
                link = Link.dial(self._name, msg.FROM_NODE, msg.FROM_RANKS)
            except OSError:
                return
            proxy = _Proxy(_Wire(connected), link, self._slots)
            with self._lock:
                self._proxies.append(proxy)
                is_whole = len(self._proxies) >= self._ranks
            if is_whole:  # before the last one knows that it is here
                self._close_listener()
            try:
                with contextlib.suppress(OSError):
                    connected.sendall(_WELCOME)
                proxy.run()
            except MessageError as error:
                self._say(f"a rank on another machine broke the protocol: {error}")

    def _close_listener(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # for a thread in `accept`
        self._listening.close()

    def close(self, waits_s: float) -> None:
        """Take no more, and wait until those here have left."""
        self._close_listener()
        deadline = time.monotonic() + waits_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _listening() -> socket.socket:
    """Listen at a free port of all addresses, IPv6 ones too where the system has these."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("", 0), backlog=1024)


class _SharedSlots:
    """The node's vectors, mapped once for all ranks elsewhere."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[int, int], Vector] = {}
        self._lock = threading.Lock()

    def map(self, file: int, values: int) -> Vector:
        """The vector of a descriptor, which is closed. Raises TaskError."""
        about = os.fstat(file)
        key = about.st_dev, about.st_ino
        with self._lock:
            if key in self._vectors:
                os.close(file)
            else:
                self._vectors[key] = mapped(file, values, touches=False)
            return self._vectors[key]


class _Proxy:
    """Is a rank of another machine at the node's socket."""

    def __init__(self, wire: _Wire, link: Link, shared: _SharedSlots) -> None:
        self._wire, self._link, self._shared = wire, link, shared
        wire.takes = frozenset()
        self._values = 0
        self._reads: tuple[Range, ...] | None = None
        self.passed = 0
        """The number of the last directive that the rank has."""

    def run(self) -> None:
        """Pass messages until either end closes. Raises MessageError."""
        down = threading.Thread(target=self._pass_down, daemon=True)
        try:
            down.start()
            self._pass_up()
        except (EOFError, OSError, RuntimeError):
            pass
        finally:
            self._link.shut()
            self._wire.close()
            if down.ident is not None:
                down.join()
            self._link.close()

    def _pass_up(self) -> None:
        body = b""
        while True:
            kind, data = self._wire.receive()
            if kind == BODY:
                if self._reads is not None:
                    raise MessageError("a second list of parts")
                body = data
                writes, self._reads = _parts(body)
                self._wire.takes = frozenset(writes)
                continue
            message = msg.FROM_RANKS.from_wire(unpacked(data))
            if isinstance(message, msg.Shape):
                self._values = message.values
            if not isinstance(message, msg.Attached):
                self._link.send(message)
                continue
            file = written(body)
            try:
                self._link.send(message, [file])
            finally:
                os.close(file)

    def _pass_down(self) -> None:
        try:
            while True:
                found = self._link.receive()
                assert found is not None
                message, files = found
                assert isinstance(message, msg.Directive)
                match message:
                    case msg.Slots(slots=slots):
                        for slot, file in zip(slots, files, strict=True):
                            self._wire.slots[slot] = self._shared.map(file, self._values)
                    case msg.Move(how="take", base=base):
                        self._wire.send_parts(base, self._reads or ())
                    case msg.Move(base=base, reference=reference):
                        for slot in {base, reference}:
                            self._wire.send_parts(slot, self._reads or ())
                    case msg.Base(version=version, slot=slot) if version >= 0:
                        self._wire.send_parts(slot, self._reads or ())
                self._wire.send(MESSAGE, _packed(message, msg.FROM_NODE))
                self.passed = message.number
        except Exception:  # noqa: BLE001 - whatever it is, both ends must learn of it
            self._link.shut()
            self._wire.close()


def _exactly(connected: socket.socket, size: int) -> bytes:
    """So many bytes, which have `CONNECT_S` to come. Raises OSError."""
    found, ends_at = b"", time.monotonic() + CONNECT_S
    while len(found) < size:
        connected.settimeout(max(0.001, ends_at - time.monotonic()))
        more = connected.recv(size - len(found))
        if not more:
            raise ConnectionError("closed")
        found += more
    return found

"""A relay's sockets: bytes pass whole and in order, nobody waits for another, and what breaks on one side breaks on the other."""

import asyncio
import contextlib
import hashlib
import random
import socket
import struct
from pathlib import Path

import pytest
from waiting import until

from fsl_transport import Lane, LocalError
from fsl_transport.link import key_of
from fsl_transport.loop import run
from fsl_transport.relay.buffer import PIPE_BYTES
from fsl_transport.relay.rcvlowat import MUCH_BYTES, WATER_BYTES, LowWater
from fsl_transport.relay.relay import Switchboard
from fsl_transport.relay.zmtp_greeting import is_signature, mechanism_of
from fsl_transport.zmq.curve import DialerCurve, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
OPEN = SIGNATURE + b"\3\1"
GREETING = OPEN + b"CURVE".ljust(20, b"\0") + bytes(32)


class Server:
    """Takes connections and keeps them."""

    def __init__(self):
        self.came = []
        self.port = 0

    async def start(self, **place):
        """Listen."""
        self.server = await asyncio.start_server(
            lambda *pair: self.came.append(pair), **(place or {"host": "127.0.0.1", "port": 0})
        )
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self):
        """Break everything."""
        self.server.close()
        for _, writer in self.came:
            writer.transport.abort()
        await self.server.wait_closed()


@contextlib.asynccontextmanager
async def relayed(porter):
    """A server, and a relay in front of it; yields the server and a way to connect to the relay."""
    server, writers = Server(), []
    await server.start()
    porter.board = Switchboard(porter)
    _, port = porter.board.open_door("127.0.0.1:0", f"127.0.0.1:{server.port}")

    async def dial(first=GREETING):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(first)
        return reader, writer

    try:
        yield server, dial
    finally:
        for writer in writers:
            writer.transport.abort()
        await porter.board.aclose()
        await server.stop()
        await asyncio.sleep(0.01)


async def joined(server, dial):
    """Both ends of a line that stands."""
    before = len(server.came)
    near = await dial()
    await until(lambda: len(server.came) > before)
    far = server.came[-1]
    assert await far[0].readexactly(64) == GREETING
    return near, far


GOOD = GREETING
BAD_GREETINGS = {
    "empty": b"",
    "short": GOOD[:63],
    "long": GOOD + b"\0",
    "another signature": b"\xfe" + GOOD[1:],
    "signature that does not end": GOOD[:9] + b"\0" + GOOD[10:],
    "version 2": SIGNATURE + b"\2\0" + GOOD[12:],
    "unknown mechanism": OPEN + b"ROT13".ljust(20, b"\0") + bytes(32),
    "no ASCII": OPEN + bytes(range(200, 220)) + bytes(32),
}


@pytest.mark.parametrize("greeting", BAD_GREETINGS.values(), ids=BAD_GREETINGS)
def test_what_is_no_greeting(greeting):
    """Strangers send anything; nothing of it may pass for a mechanism."""
    assert mechanism_of(greeting) == ""


def test_what_is_a_greeting():
    """Each mechanism of ZMTP 3, of any minor version, whatever the padding of the signature."""
    for name in ("NULL", "PLAIN", "CURVE", "GSSAPI"):
        assert mechanism_of(OPEN + name.encode().ljust(20, b"\0") + bytes(32)) == name
    odd = b"\xff" + bytes(range(8)) + b"\x7f"
    assert is_signature(odd)
    assert mechanism_of(odd + b"\3\0" + GOOD[12:]) == "CURVE"


@pytest.mark.parametrize("copies", [False, True])
def test_bytes_pass_whole_and_in_order_both_ways(new_porter, monkeypatch, copies):
    """Far more than fits inside, in pieces of every size, whoever moves them."""
    if copies:
        monkeypatch.setattr("fsl_transport.relay.buffer.can_splice", lambda: False)

    async def main():
        porter, chance = new_porter(), random.Random(3)
        async with relayed(porter) as (server, dial):
            near, far = await joined(server, dial)
            data = chance.randbytes(5 << 20)

            async def send(writer):
                place = 0
                while place < len(data):
                    size = chance.choice([1, 7, 100, 4096, 70_000, 1 << 20])
                    writer.write(data[place : place + size])
                    place += size
                    await writer.drain()

            ways = ((near[1], far[0]), (far[1], near[0]))
            sending = [asyncio.ensure_future(send(writer)) for writer, _ in ways]
            for _, reader in ways:
                assert (
                    hashlib.sha256(await reader.readexactly(len(data))).digest()
                    == hashlib.sha256(data).digest()
                )
            await asyncio.gather(*sending)
            (carried,) = porter.board.carried()
            assert (carried.up, carried.down) == (64 + len(data), len(data))
            near[1].close()
            await until(lambda: porter.said("ended"))
            assert porter.said("ended") == [(1, "the client closed it", 64 + len(data), len(data))]

    run(main())


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_little_passes_after_what_is_much(new_porter, monkeypatch, copies, tells):
    """A relay that waits for more while much passes still looks for what is less, also where lowering the mark wakes nobody."""
    monkeypatch.setattr(
        "fsl_transport.relay.rcvlowat.PAUSE_S", 10.0
    )  # a busy machine pauses by itself
    if copies:
        monkeypatch.setattr("fsl_transport.relay.buffer.can_splice", lambda: False)
    made = []

    class Watched(LowWater):
        def __init__(self, *given):
            super().__init__(*given)
            self.marks = []
            made.append(self)

        def _mark(self, size):
            self.marks.append(size)
            if tells or size > 1:
                super()._mark(size)

    monkeypatch.setattr("fsl_transport.relay.forwarder.LowWater", Watched)
    size = 3 * MUCH_BYTES

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            near, far = await joined(server, dial)
            near[1].write(bytes(size))
            near[1].write(b"little")
            await far[0].readexactly(size)
            assert await asyncio.wait_for(far[0].readexactly(6), 5.0) == b"little"
            (up,) = [water for water in made if water.marks]
            assert WATER_BYTES in up.marks
            assert up._source.getpeername() == near[1].get_extra_info("sockname")
            if tells:
                await until(lambda: up.marks[-1] == 1 and up._timer is None)
                marks = len(up.marks)
                for _ in range(20):
                    near[1].write(b"ping")
                    assert await asyncio.wait_for(far[0].readexactly(4), 5.0) == b"ping"
                assert len(up.marks) == marks
                near[1].write(bytes(size))
                near[1].write(b"last words")
            near[1].close()
            assert (await asyncio.wait_for(far[0].read(), 5.0))[-10:] == b"last words" * tells
            await until(lambda: porter.said("ended"))
            assert [water._timer for water in made] == [None] * len(made)

    run(main())


def test_a_stream_that_is_cut_off_is_looked_for_no_more(new_porter, monkeypatch):
    """Its timer would keep what has ended for as long as it goes on, and read from a closed socket."""
    made = []

    class Watched(LowWater):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("fsl_transport.relay.forwarder.LowWater", Watched)

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            near, far = await joined(server, dial)
            near[1].write(bytes(3 * MUCH_BYTES))
            await far[0].readexactly(MUCH_BYTES)
            for water in made:
                water._wait()
            porter.board.drop(1, "a test")
            assert [water._timer for water in made] == [None] * len(made)

    run(main())


def test_who_takes_nothing_holds_nobody_else_up(new_porter):
    """One tank and the kernel's buffers are all that a stuck line gets; the one beside it is as fast as ever."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            slow_near, slow_far = await joined(server, dial)
            slow_far[0]._transport.pause_reading()
            near, far = await joined(server, dial)
            flood = asyncio.ensure_future(_flood(slow_near[1]))
            await until(lambda: porter.board.carried()[0].held_up)
            last = -1
            while porter.board.carried()[0].up != last:
                last = porter.board.carried()[0].up
                for _ in range(20):
                    near[1].write(b"ping")
                    assert await far[0].readexactly(4) == b"ping"
            assert 0 < porter.board.carried()[0].held_up <= PIPE_BYTES
            assert porter.board._pool.lent == 1
            flood.cancel()
            porter.board.drop(1, "stuck")
            assert porter.board._pool.lent == 0
            with pytest.raises(ConnectionError):
                await _flood(slow_near[1])

    run(main())


async def _flood(writer):
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_what_breaks_on_one_side_breaks_on_the_other(new_porter, side, how):
    """Otherwise a client waits at a relay whose server is long gone. What was said before a close still arrives."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            near, far = await joined(server, dial)
            here, there = (near, far) if side == "client" else (far, near)
            here[1].write(b"last words")
            if how == "closes":
                here[1].close()
                assert await there[0].read() == b"last words"
            else:
                connection = here[1].get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                here[1].transport.abort()
                with contextlib.suppress(ConnectionError):
                    await there[0].read()
            await until(lambda: porter.said("ended"))
            if how == "closes":
                assert porter.said("ended")[0][1] == f"the {side} closed it"
            assert porter.board.carried() == []

    run(main())


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", bytes(10), b"\xff" * 10])
def test_who_speaks_something_else_never_reaches_the_server(new_porter, first):
    """Scanners and browsers are the relay's guests only."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            reader, _ = await dial(first)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            assert porter.said("greeted") == [(1, "")]
            assert porter.said("signed") == []
            assert server.came == []

    run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux only")
def test_what_stays_on_this_machine_is_not_paced(new_porter):
    """A relay on loopback beside its server must not be slowed down by a congestion control made for lines (BBR paces)."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            await joined(server, dial)
            line = porter.board._lines[1]
            for end in (line.client, line.server):
                found = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert found.rstrip(b"\0") == b"reno"

    run(main())


def test_a_mechanism_is_judged_before_it_passes(new_porter):
    """A line that is dropped for it has given the server signature and version, and nothing else."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            reader, writer = await dial(OPEN[:11])
            await until(lambda: server.came)
            assert await server.came[0][0].readexactly(11) == OPEN[:11]
            writer.write(OPEN[11:] + bytes(range(200, 252)) + b"secret")
            assert await server.came[0][0].read() in {b"", OPEN[11:]}
            with contextlib.suppress(ConnectionError):
                await reader.read()
            assert porter.said("ended")[0][1] == "no ZeroMQ"

    run(main())


def test_a_server_that_comes_later_is_reached_later(new_porter):
    """The client's connection is held meanwhile; when the owner gives up, it is closed."""

    async def main():
        porter, server = new_porter(), Server()
        reserved = socket.socket()  # a port that is nobody else's, and not listened at yet
        reserved.bind(("127.0.0.1", 0))
        porter.board = Switchboard(porter)
        _, port = porter.board.open_door("127.0.0.1:0", f"127.0.0.1:{reserved.getsockname()[1]}")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GREETING)
        await until(lambda: len(porter.said("undialled")) >= 3)
        assert porter.said("undialled")[0] == (1, "connection refused")
        await server.start(sock=reserved)
        await until(lambda: server.came)
        assert await server.came[0][0].readexactly(64) == GREETING
        writer.transport.abort()
        await porter.board.aclose()
        await server.stop()
        await asyncio.sleep(0.01)

    run(main())


def test_a_name_that_nobody_knows_is_said(new_porter):
    """A typing error in the server's name must not look like a server that is down."""

    async def main():
        porter = new_porter()
        porter.board = Switchboard(porter)
        _, port = porter.board.open_door("127.0.0.1:0", "no-such-host.invalid:7100")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SIGNATURE)
        await until(lambda: porter.said("undialled"))
        assert "name" in porter.said("undialled")[0][1].lower()
        writer.close()
        await porter.board.aclose()

    run(main())


def test_ports_that_are_taken_and_names_that_are_none():
    """Named before anybody connects."""

    async def main():
        board = Switchboard(None)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            place = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(LocalError, match="address already in use"):
                board.open_door(place, "127.0.0.1:1")
        with pytest.raises(LocalError):
            board.open_door("127.0.0.1:0", "nowhere")
        with pytest.raises(LocalError):
            board.open_door("no-such-host.invalid:0", "127.0.0.1:1")
        await board.aclose()

    run(main())


def test_after_the_doors_are_closed_lines_go_on(new_porter):
    """What a relay that ends needs; and nothing is left open when all is over."""
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir())) if files.is_dir() else None

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            near, far = await joined(server, dial)
            porter.board.stop_listening()
            with pytest.raises(OSError, match=r"(?i)connect"):
                await dial()
            near[1].write(b"still")
            assert await far[0].readexactly(5) == b"still"
        assert porter.said("ended") == [], "ended without a word"

    run(main())
    if before is not None:
        assert len(list(files.iterdir())) <= before


def test_nobody_gets_in_for_whom_there_is_no_file_left(new_porter, monkeypatch):
    """Out of descriptors a relay waits a moment and goes on; it must not spin or die."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            listener = porter.board._doors[0].listener

            class Full:
                def accept(self):
                    raise OSError(24, "Too many open files")

                def fileno(self):
                    return listener.fileno()

                def close(self):
                    listener.close()

            porter.board._doors[0].listener = Full()
            await dial()
            await until(lambda: porter.board.refused_by_system)
            porter.board._doors[0].listener = listener
            await until(lambda: server.came)
            assert porter.board.refused_by_system <= 5

    run(main())


def test_many_lines_at_once(new_porter):
    """Each gets its own bytes, and all of them are gone at the end."""

    async def main():
        porter = new_porter()
        async with relayed(porter) as (server, dial):
            nears = [await dial() for _ in range(60)]
            await until(lambda: len(server.came) == 60)

            async def echo(reader, writer):
                await reader.readexactly(64)
                writer.write(await reader.readexactly(8))

            echoes = [asyncio.ensure_future(echo(*pair)) for pair in server.came]
            for number, (_, writer) in enumerate(nears):
                writer.write(struct.pack("<q", number))
            for number, (reader, _) in enumerate(nears):
                assert await reader.readexactly(8) == struct.pack("<q", number)
            await asyncio.gather(*echoes)
            for _, writer in nears:
                writer.close()
            await until(lambda: len(porter.said("ended")) == 60)
            assert porter.board._lines == {}
            assert porter.board._pool.lent == 0

    run(main())


def test_all_connections_of_a_dialer_go_through_the_relay(new_porter):
    """Stripes that are opened later, and what is dialled again, reach the server the way the first connections did, with their key; or not at all."""

    async def main():
        porter, got, server, pair = new_porter(), [], KeyPair.new(), KeyPair.new()
        listener = ZmqListener(
            "127.0.0.1:0", None, ListenerCurve(server, {pair.public}.__contains__)
        )
        listener.set_receiver(lambda *message: got.append(message))
        porter.board = Switchboard(porter)
        _, port = porter.board.open_door("127.0.0.1:0", f"127.0.0.1:{listener.port}")
        dialer = ZmqDialer(f"127.0.0.1:{port}", "c", None, DialerCurve(pair, server.public))

        async def all_arrive():
            got.clear()
            while len({bytes(parts[0]) for _, _, parts, _ in got}) < 5:  # what breaks loses some
                dialer.send("", Lane.CONTROL, [b"control"])
                for stripe in range(4):
                    dialer.send("", Lane.BULK, [b"%d" % stripe], stripe=stripe)
                await asyncio.sleep(0.01)
            assert {key_of(origin) for *_, origin in got} == {pair.public}

        dialer.open_stripes(4)
        await all_arrive()
        assert len(porter.said("accepted")) == listener.connections == 5
        dialer.redial()
        await until(lambda: len(porter.said("accepted")) == 10)
        await all_arrive()
        await until(lambda: listener.connections == 5)
        assert len(porter.board._lines) == 5
        await dialer.aclose()
        await porter.board.aclose()
        await listener.aclose()

    run(main())

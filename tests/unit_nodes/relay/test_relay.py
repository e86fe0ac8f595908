"""A relay: bytes pass unchanged, connections are independent, attackers end only their own."""

import asyncio
import contextlib
import errno
import random
import socket

import pytest
from waiting import open_files, until

from fsl_async.errors import AddressError
from fsl_async.nodes.relay import pair, relay
from fsl_async.nodes.relay.pair import Drop
from fsl_async.nodes.relay.relay import Route
from fsl_transport.loop import run
from fsl_transport.relay.buffer import COPY_BYTES, PIPE_BYTES, can_splice

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
OPEN = SIGNATURE + b"\3\1"
HELD_BYTES = PIPE_BYTES if can_splice() else COPY_BYTES


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    """The end of connections is tested in test_pair_end.py; here many peers do not close."""
    monkeypatch.setattr(pair, "LINGER_S", 0.3)


def greeting_of(mechanism):
    return OPEN + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("copies", [False, True])
def test_bytes_pass_unchanged_and_in_order_both_ways(relayed, monkeypatch, copies):
    """More bytes than fit into the relay, in pieces of all sizes, spliced or copied."""
    if copies:
        monkeypatch.setattr("fsl_transport.relay.buffer.can_splice", lambda: False)
    chance = random.Random(3)
    data = chance.randbytes(5 << 20)

    async def send(connection):
        place, loop = 0, asyncio.get_running_loop()
        while place < len(data):
            size = chance.choice([1, 7, 100, 4096, 70_000, 1 << 20])
            await loop.sock_sendall(connection, data[place : place + size])
            place += size

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            sending = [asyncio.ensure_future(send(end)) for end in (near, far)]
            got = await asyncio.gather(one.read(far, len(data)), one.read(near, len(data)))
            assert got == [data, data]
            await asyncio.gather(*sending)
            assert one.relay.carried() == (64 + len(data), len(data), 0)
            near.close()
            ended = await one.ended()
            assert (ended["up"], ended["down"]) == (64 + len(data), len(data))
            assert (ended["reason"], ended["drop"]) == ("the client closed it", "")
            assert one.relay.carried() == (64 + len(data), len(data), 0)

    run(main())


def test_a_connection_that_takes_nothing_delays_no_other(relayed):
    """It fills one buffer and the kernel's only."""

    async def main():
        async with relayed() as one:
            stuck, _ = await one.joined()
            near, far = await one.joined()
            await one.fill(stuck)
            assert 0 < one.relay.carried()[2] <= HELD_BYTES
            for _ in range(20):
                near.send(b"ping")
                assert await one.read(far, 4) == b"ping"

    run(main())


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", bytes(10), b"\xff" * 10])
def test_bytes_that_are_not_zmtp_never_reach_the_server(relayed, first):
    """Scanners and browsers must not reach the server."""

    async def main():
        async with relayed() as one:
            near = await one.near(first)
            with contextlib.suppress(ConnectionError):
                assert await one.read(near) == b""
            assert (await one.ended())["drop"] == Drop.NOT_ZMTP
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.far(), 0.1)

    run(main())


@pytest.mark.parametrize(
    ("mechanism", "requires_curve", "drop"),
    [
        (b"CURVE", True, ""),
        (b"NULL", False, ""),
        (b"NULL", True, Drop.UNENCRYPTED),
        (b"PLAIN", True, Drop.UNENCRYPTED),
        (b"ROT13", False, Drop.NOT_ZMTP),
    ],
)
def test_a_mechanism_is_checked_before_it_passes(relayed, mechanism, requires_curve, drop):
    """The server gets only the signature of a connection that is dropped for it."""

    async def main():
        async with relayed(requires_curve=requires_curve) as one:
            whole = greeting_of(mechanism) + b"secret"
            near = await one.near(whole[:30])
            far = await one.far()
            assert await one.read(far, 10) == SIGNATURE
            far.send(SIGNATURE)
            assert await one.read(near, 10) == SIGNATURE, "the server's answer passes at once"
            near.send(whole[30:])
            if not drop:
                assert await one.read(far, len(whole) - 10) == whole[10:]
                return
            assert (await one.ended())["drop"] == drop
            with contextlib.suppress(ConnectionError):
                assert await one.read(far) == b""
            assert one.relay.dropped == {drop: 1}

    run(main())


@pytest.mark.parametrize("first", [b"", SIGNATURE[:9], OPEN, greeting_of(b"CURVE")[:63]])
def test_a_greeting_has_a_time_limit(relayed, monkeypatch, first):
    """Neither silence nor an endless greeting keeps a place."""
    monkeypatch.setattr(pair, "GREETING_S", 0.2)

    async def main():
        async with relayed() as one:
            near = await one.near(first)
            with contextlib.suppress(ConnectionError):
                assert await one.read(near) == b""
            assert (await one.ended())["drop"] == Drop.SILENT
            assert one.relay._pairs == {}

    run(main())


def test_one_address_gets_half_of_the_places(relayed):
    """Repeated connections cause one warning, and places become free again."""

    async def main():
        async with relayed(limit=4) as one:
            first, _ = await one.joined()
            await one.joined()
            for _ in range(3):
                near = await one.near()
                with contextlib.suppress(ConnectionError):
                    assert await one.read(near) == b""
            assert one.relay.dropped == {Drop.FULL: 3}
            assert len(one.wrote("connection_accepted")) == 2, "a flood must not fill the journal"
            (note,) = one.notes
            text = "a connection is refused: 2 connections of 127.0.0.1 already"
            assert (note.level, note.text) == ("warning", text)
            first.close()
            await one.ended()
            await one.joined()

    run(main())


def test_a_peer_that_takes_nothing_is_given_up(relayed, monkeypatch):
    """The kernel ends its connection, and the relay the other one."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("Linux only")
    monkeypatch.setattr(pair, "_KEEPALIVE", (("TCP_USER_TIMEOUT", 500),))

    async def main():
        async with relayed() as one:
            near, _ = await one.joined()
            await one.fill(near)
            assert (await one.ended())["reason"] in {"no answer", "broken pipe"}

    run(main())


def test_a_server_that_starts_later_is_reached(relayed):
    """The client's connection is held meanwhile, and each change is reported once."""

    async def main():
        with socket.socket() as reserved:  # a port without a listener yet
            reserved.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{reserved.getsockname()[1]}"
            async with relayed(server=place) as one:
                await one.near()
                await until(lambda: one.notes)
                await asyncio.sleep(0.6)
                reserved.listen()
                reserved.setblocking(False)
                far, _ = await asyncio.get_running_loop().sock_accept(reserved)
                assert await one.read(one.keep(far), 64) == greeting_of(b"CURVE")
                away, back = one.notes
                reason = "connection refused; it is dialed for each client that connects"
                assert (away.level, away.text) == ("warning", f"cannot reach {place}: {reason}")
                assert (back.level, back.text) == ("info", f"{place} is reached again")
                assert [line["text"] for line in one.wrote("note")] == [
                    note.text for note in one.notes
                ]

    run(main())


def test_a_server_that_stays_away_ends_the_clients_connection(relayed, monkeypatch):
    """It tries again by itself, and its place is free meanwhile."""
    monkeypatch.setattr(pair, "DIAL_S", 0.5)

    async def main():
        async with relayed(server="no-such-host.invalid:7100") as one:
            near = await one.near()
            with contextlib.suppress(ConnectionError):
                assert await one.read(near) == b""
            ended = await one.ended()
            assert ended["drop"] == Drop.NO_SERVER
            assert "name" in ended["reason"].lower(), "the reason names the host's name"
            assert ended["reason"].removeprefix("no server: ") in one.notes[0].text

    run(main())


def test_used_ports_and_bad_addresses_are_refused(relayed):
    """The error is one line, before anything connects."""

    async def main():
        async with relayed() as one:
            taken = f"127.0.0.1:{one.port}"
            with pytest.raises(AddressError, match=f"{taken}: address already in use"):
                one.relay.listen(Route(taken, "127.0.0.1:1", requires_curve=False))
            for listen, server in (
                ("127.0.0.1:0", "nowhere"),
                ("nowhere", "127.0.0.1:1"),
                ("no-such-host.invalid:0", "127.0.0.1:1"),
            ):
                with pytest.raises(AddressError):
                    one.relay.listen(Route(listen, server, requires_curve=False))

    run(main())


def test_a_relay_that_drains_lets_a_transfer_finish(relayed, monkeypatch):
    """Its port is closed meanwhile, heartbeats do not delay it, and nothing stays open."""
    monkeypatch.setattr(relay, "DRAIN_LOOK_S", 0.3)
    run(asyncio.sleep(0))  # what a process's first event loop opens stays open
    before = open_files()

    async def main():
        async with relayed() as one:
            near, far = await one.joined()
            draining = asyncio.ensure_future(one.relay.drain())
            await asyncio.sleep(0)
            with pytest.raises(OSError, match=r"(?i)refused"):
                await one.near()
            for _ in range(10):
                near.send(bytes(100_000))
                assert len(await one.read(far, 100_000)) == 100_000
                await asyncio.sleep(0.1)
                assert not draining.done()
            for _ in range(7):
                near.send(b"beat")
                await asyncio.sleep(0.1)
            await asyncio.wait_for(draining, 5.0)
            assert not one.wrote("connection_ended")

    run(main())
    assert open_files() <= before


def test_a_drain_has_a_time_limit(relayed, monkeypatch):
    """Bytes held for a peer that takes nothing must not delay the end."""
    monkeypatch.setattr(relay, "DRAIN_S", 0.5)

    async def main():
        async with relayed() as one:
            near, _ = await one.joined()
            await one.fill(near)
            await asyncio.wait_for(one.relay.drain(), 5.0)
            assert one.relay.carried()[2] > 0

    run(main())


def test_out_of_file_descriptors_a_relay_waits_and_goes_on(relayed, monkeypatch):
    """It must neither loop nor end."""
    monkeypatch.setattr(relay, "_ACCEPT_PAUSE_S", 0.05)

    async def main():
        async with relayed() as one:
            (port,) = one.relay._ports
            real, refused = port.listener.accept, []

            class Full:
                def __getattr__(self, name):
                    return getattr(port.listener, name)

                def accept(self):
                    if len(refused) < 3:
                        refused.append(None)
                        raise OSError(errno.EMFILE, "too many open files")
                    return real()

            one.relay._loop.remove_reader(port.listener.fileno())
            one.relay._accept_from(relay._Port(port.route, Full(), port.server))
            await one.joined()
            assert len(refused) == 3

    run(main())

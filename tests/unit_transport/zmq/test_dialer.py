"""A dialer on real sockets: what it keeps, how many connections it opens, when it dials again."""

# ruff: noqa: ASYNC110 - a test polls for its condition

import asyncio
import os
import resource
import socket

import pytest
from waiting import open_files, until

from fsl_transport import Lane
from fsl_transport.loop import run
from fsl_transport.zmq import link as zmq_link
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

UNIT_S = 0.1 * float(os.environ.get("FSL_TEST_TIME_UNIT", "1"))


def test_a_dialer_adopts_settings(new_settings):
    """They arrive with the welcome: for queues at once, for sockets from the next connection."""

    async def main():
        probe = socket.create_server(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        dialer = ZmqDialer(f"127.0.0.1:{port}", "c")
        mib = 1 << 20
        adopted = new_settings(
            window_bytes=8 * mib, window_limit_bytes=8 * mib, expire_after_s=77.0
        )
        dialer.adopt(adopted)
        dialer.open_stripes(2)
        for _ in range(50):
            dialer.send("", Lane.BULK, [b"chunk", bytes(mib)])
        dialer.send("", Lane.CONTROL, [b"hello"])
        got = []
        listener = ZmqListener(f"127.0.0.1:{port}")
        listener.set_receiver(lambda peer, lane, parts, origin: got.append(lane))
        async with asyncio.timeout(100 * UNIT_S):
            while Lane.CONTROL not in got or len(got) < 8:
                await asyncio.sleep(0.005)
        await asyncio.sleep(2 * UNIT_S)
        assert got.count(Lane.BULK) == 7  # what fits into 8 MiB with its heads
        for pipe in dialer._pipes:
            assert pipe.socket.tcp_maxrt == 77_000
            assert pipe._send_budget.limit_bytes == adopted.send_budget_bytes
        await dialer.aclose()
        dialer.adopt(adopted)
        await listener.aclose()

    run(main())


@pytest.mark.parametrize("spare", range(9))
def test_stripes_without_descriptors_are_left_out(monkeypatch, spare):
    """With 256 files, opening 64 stripes raised during a transfer; open ones must go on."""

    async def main():
        listener = ZmqListener("127.0.0.1:0")
        got = []
        listener.set_receiver(lambda peer, lane, parts, origin: got.append(bytes(parts[0])))
        dialer = ZmqDialer(f"127.0.0.1:{listener.port}", "c")
        dialer.send("", Lane.CONTROL, [b"up"])
        await until(lambda: got)
        monkeypatch.setattr(zmq_link, "descriptors", lambda: 0)  # it is allowed no more than it has
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        open_now = open_files()
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + spare, before[1]))
        try:
            dialer.open_stripes(64)
            dialer.open_stripes(64)
            pipes = list(dialer._pipes)
            dialer.send("", Lane.BULK, [b"63"], stripe=63)  # as if its connection did not come up
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert 2 <= len(pipes) < 20
        for stripe in range(len(pipes) - 1):
            dialer.send("", Lane.BULK, [b"%d" % stripe], stripe=stripe)
        await until(lambda: len(got) == len(pipes))
        assert b"63" not in got
        monkeypatch.undo()
        dialer.open_stripes(64)
        assert len(dialer._pipes) == 65, "descriptors are there again"
        await dialer.aclose()
        await listener.aclose()

    run(main())


def test_a_dialer_raises_the_limit_of_descriptors():
    """Many systems start with a few hundred and allow thousands."""

    async def main():
        listener = ZmqListener("127.0.0.1:0")
        dialer = ZmqDialer(f"127.0.0.1:{listener.port}", "c")
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 40, before[1]))
        try:
            dialer.open_stripes(64)
            assert len(dialer._pipes) == 65
        finally:
            await dialer.aclose()
            await listener.aclose()
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    run(main())


def test_a_name_that_resolves_later_is_dialed_over_its_kind_of_address(monkeypatch):
    """A client started before its machine had a network must not assume IPv4 for good."""

    async def main():
        asked, answers = [], [OSError("no network yet"), [socket.AF_INET6], OSError("away"), [], []]

        async def getaddrinfo(host, port, **_):
            asked.append(host)
            found = answers[len(asked) - 1]
            if isinstance(found, OSError):
                raise found
            return [(family, 0, 0, "", ()) for family in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        dialer = ZmqDialer("localhost:9", "c")
        dialer.open_stripes(2)
        kinds = []
        for count in range(1, 5):
            await until(lambda wanted=count: len(asked) == wanted)
            await asyncio.sleep(0.01)
            kinds.append({pipe.socket.ipv6 for pipe in dialer._pipes})
            dialer.redial()
        assert kinds == [{0}, {1}, {1}, {1}]
        await dialer.aclose()

    run(main())


def test_redialing_does_not_wait_for_the_name(monkeypatch):
    """A resolver may take half a minute; connections made meanwhile must not be replaced."""

    async def main():
        listener = ZmqListener("127.0.0.1:0")
        got, dialled, answer = [], [], asyncio.Event()
        listener.set_receiver(lambda peer, lane, parts, origin: got.append(bytes(parts[0])))
        dialer = ZmqDialer(f"localhost:{listener.port}", "c")
        dialer.send("", Lane.CONTROL, [b"up"])
        await until(lambda: got)

        async def getaddrinfo(*_, **__):
            await answer.wait()
            return [(socket.AF_INET, 0, 0, "", ())]

        again = dialer._dial_again
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(dialer, "_dial_again", lambda pipe: (dialled.append(pipe), again(pipe)))
        dialer.redial()
        assert len(dialled) == 2
        answer.set()
        await asyncio.sleep(0.05)
        assert len(dialled) == 2
        await dialer.aclose()
        await listener.aclose()

    run(main())

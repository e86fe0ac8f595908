"""The proxy: delay and rate, order, cut and healed, closed."""

import contextlib
import socket
import threading
import time

import pytest

from fsl_async.plan.link import parse_link
from fsl_async.tools.chaos.links import FileLink
from fsl_async.tools.proxy import Proxy

DATA = bytes(range(256)) * 400


@pytest.fixture
def echo():
    """Run a server that sends back what it gets; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with end:
                while data := end.recv(1 << 16):
                    end.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def dial(link):
    host, port = link.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def test_bytes_are_late_by_the_delay_and_paced_by_the_rate(echo):
    """102,400 bytes each way at 16 Mbit/s and 30 ms: 51 ms to send, and a round trip of 60 ms."""
    link = Proxy(link=parse_link("16mbit,30ms"))
    try:
        with dial(link) as end:
            begun = time.monotonic()
            end.sendall(DATA)  # the proxy has no target yet, so it waits
            link.target = echo
            found = b""
            first = 0.0
            while len(found) < len(DATA):
                found += end.recv(1 << 16)
                first = first or time.monotonic() - begun
            took = time.monotonic() - begun
        assert found == DATA
        assert first > 0.060
        assert 0.111 < took < 1.0
    finally:
        link.close()


def test_closing_cuts_open_connections(echo):
    """The nodes behind it detect the end."""
    link = Proxy(echo)
    with dial(link) as end:
        end.sendall(b"x")
        assert end.recv(1) == b"x"
        link.close()
        with contextlib.suppress(ConnectionError):  # an abort may show as a reset
            assert not end.recv(1)
    with pytest.raises(ConnectionError):
        dial(link)


def read(end, size):
    """Read exactly so many bytes."""
    found = b""
    while len(found) < size:
        found += end.recv(size - len(found))
    return found


def test_a_cut_link_passes_nothing_until_it_is_healed(echo, tmp_path):
    """Connections stay and lose nothing, as with a link repaired before TCP gives up."""
    path = tmp_path / "links" / "a"
    proxy, link = Proxy(echo, follow=path), FileLink(path)
    try:
        with dial(proxy) as end:
            end.sendall(b"one")
            assert read(end, 3) == b"one"
            link.cut()
            time.sleep(0.3)
            end.sendall(b"two")
            end.settimeout(0.4)
            with pytest.raises(TimeoutError):
                end.recv(1)
            link.restore()
            end.settimeout(20)
            assert read(end, 3) == b"two"
            link.slow()
            time.sleep(0.3)
            begun = time.monotonic()
            end.sendall(bytes(10_000))
            first = len(end.recv(1 << 16))
            assert time.monotonic() - begun < 0.5  # in pieces, to let other traffic through
            read(end, 10_000 - first)
            assert time.monotonic() - begun > 0.4
    finally:
        proxy.close()


def test_it_can_be_closed_before_it_was_used():
    """A run that fails early closes it unused."""
    for _ in range(50):
        proxy = Proxy()
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionError):
            dial(proxy)


def test_unread_bytes_are_not_kept():
    """A sender waits for its receiver, so a stalled receiver does not fill this process's
    memory.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        proxy = Proxy(listener.getsockname())
        try:
            with dial(proxy) as end:
                end.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    end.sendall(bytes(64 << 20))
        finally:
            proxy.close()

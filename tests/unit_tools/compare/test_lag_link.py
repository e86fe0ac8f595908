"""The proxy's line: as late and as slow as it says, in order, and cut when it is closed."""

import contextlib
import socket
import threading
import time

import pytest

from fsl_async.plan.link import parse_link
from fsl_async.tools.compare.lag_link import LagLink

DATA = bytes(range(256)) * 400


@pytest.fixture
def echo():
    """A server that sends back what it gets; gives its address."""
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
    link = LagLink(parse_link("16mbit,30ms"))
    try:
        with dial(link) as end:
            begun = time.monotonic()
            end.sendall(DATA)  # nobody is behind the proxy yet: it waits
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


def test_closing_cuts_what_stands(echo):
    """The nodes behind it must notice."""
    link = LagLink(parse_link("1gbit"))
    link.target = echo
    with dial(link) as end:
        end.sendall(b"x")
        assert end.recv(1) == b"x"
        link.close()
        with contextlib.suppress(ConnectionError):  # an abort may be told as a reset
            assert not end.recv(1)
    with pytest.raises(ConnectionError):
        dial(link)

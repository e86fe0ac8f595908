"""Two connections, for tests of what is between them."""

import socket

import pytest


@pytest.fixture
def pair():
    """Two connections: what is written to the first end can be read from the source, what the
    target receives from the last end.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = []
        for _ in range(2):
            ends.append(socket.create_connection(listener.getsockname()))
            ends.append(listener.accept()[0])
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()

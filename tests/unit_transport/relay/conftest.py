"""Two connections for what is between them."""

import socket

import pytest


@pytest.fixture
def pair():
    """What is written to the first end comes out of the source, what the target gets out of the
    last.
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

"""Both ends of a connection between a node and a rank."""

import socket

from fsl_async.learn.gang.link import Link


def linked():
    """A node's end and a rank's."""
    return tuple(Link(end) for end in socket.socketpair())

"""Admission of a listener's connections: how many may be open, and how fast new ones may come.

libzmq accepts connections while the system has file descriptors; when none are left, this process
cannot open its own files either. libzmq's socket monitor reports the descriptor of each connection
it accepts. A connection over the limit is shut down through that descriptor, which libzmq sees as
the peer closing it. If the number was reused meanwhile, a file is not harmed (it is not a socket),
and a connection is a newer one, which is over the limit as well.

Established connections stay: a flood keeps out new peers, not connected ones. The rate of new
connections is limited by ``access_control.ConnectionLimits``. libzmq runs its part of a handshake
in its own thread, so some connections over the rate have received their first reply when they are
closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Callable
from typing import Final

from fsl_transport.session.access_control import ConnectionLimits
from fsl_transport.settings import TransportSettings

RESERVED: Final = 512
"""Descriptors kept free of connections, where there are many: for the run's files, and for accepted
connections that are still to be closed."""
LEAST_RESERVED: Final = 64
"""The same where there are few. A parameter server holds about 40 of its own: libzmq's, the event
loop's, its files, its own dialing."""
OPEN_MAX: Final = 10_240
"""Maximum on macOS, where the reported limit is infinite."""


def descriptors() -> int:
    """Return how many descriptors this process may have, after raising the limit if allowed."""
    try:
        import resource
    except ImportError:  # a system without them
        return 2048
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        for wanted in (hard, min(hard, max(soft, OPEN_MAX))):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft >= 0 else 1 << 20


def in_use() -> int:
    """Return how many descriptors this process has open; 0 if the system does not tell."""
    for place in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return sum(1 for _ in pathlib.Path(place).iterdir())
    return 0


def connections_within(files: int, held: int) -> int:
    """Return how many connections fit into `files` descriptors of which `held` are taken."""
    return files - max(held + LEAST_RESERVED, min(RESERVED, files // 4))


def files_for(connections: int, held: int) -> int:
    """Return the smallest number of descriptors for which `connections_within` gives as many."""
    quarter_reserved = -(-4 * connections // 3)
    return max(connections + held + LEAST_RESERVED, min(quarter_reserved, connections + RESERVED))


class ConnectionAdmission:
    """Counts a listener's connections by descriptor, and closes those over a limit."""

    def __init__(self, settings: TransportSettings, now: float) -> None:
        fits = connections_within(descriptors(), 0)
        self.limit = max(1, min(settings.max_connections, fits))
        self.limits = ConnectionLimits(settings, now)
        self.rejected = 0
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int, now: float) -> None:
        """Libzmq accepted a connection."""
        self._open.add(descriptor)
        if len(self._open) > self.limit or not self._within_rate(descriptor, now):
            self.rejected += 1
            _with_connection(descriptor, lambda found: found.shutdown(socket.SHUT_RDWR))

    def closed(self, descriptor: int) -> None:
        """A connection is gone."""
        self._open.discard(descriptor)

    def _within_rate(self, descriptor: int, now: float) -> bool:
        """Whether the rates allow the connection. One that is gone already takes no token."""
        peers: list[object] = []
        _with_connection(descriptor, lambda found: peers.append(found.getpeername()))
        address = str(peers[0][0]) if peers and isinstance(peers[0], tuple) else ""
        return not peers or self.limits.allows(address, now)


def _with_connection(descriptor: int, act: Callable[[socket.socket], object]) -> None:
    """Act on libzmq's connection through a duplicate descriptor. No effect if it is gone."""
    with contextlib.suppress(OSError):
        try:
            own = os.dup(descriptor)
        except OSError as error:
            # Many connections took the last descriptors, so these above all must be closed.
            if error.errno == errno.EMFILE:
                _with_borrowed(descriptor, act)
            return
        try:
            connection = socket.socket(fileno=own)
        except OSError:  # not a socket, so the duplicate is still ours to close
            os.close(own)
            return
        # Closes exactly once, whatever `act` raises. On a second close the number may belong to a
        # file, or to libzmq, which would abort the process.
        with connection:
            act(connection)


def _with_borrowed(descriptor: int, act: Callable[[socket.socket], object]) -> None:
    """Act through libzmq's own descriptor, where none is left for a duplicate.

    An interrupt in here would close libzmq's descriptor.
    """
    connection = socket.socket(fileno=descriptor)
    try:
        act(connection)
    finally:
        connection.detach()

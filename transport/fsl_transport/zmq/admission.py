"""How many connections a listener has, how fast new ones come, and which one is too many.

libzmq takes every connection that the system has a descriptor for, and when there are none left, our own files cannot be opened either. Its
socket monitor tells of each connection by its descriptor; one that is too many is shut down there, which libzmq sees as the other
side hanging up. By then the number may belong to something else: a file is not harmed (it is no socket), and the newest
connections are those that are too many anyhow.

Connections that stand stay: a flood keeps newcomers out, not those who are here. How fast they may come says ``gate.ArrivalLimits``. libzmq does its
part of a handshake in a thread of its own, so that some of those that come too fast have got their first answer when they are hung up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Callable
from typing import Final

from fsl_transport.session.access_control import ArrivalLimits
from fsl_transport.settings import TransportSettings

RESERVED: Final = 512
"""Descriptors kept free of connections, where there are many: files of the run, and connections that libzmq accepted and that are still to be shut down."""
LEAST_RESERVED: Final = 64
"""The same where there are few. A parameter server holds about 40 of its own: libzmq's, the event loop's, its files, its own dialing."""
OPEN_MAX: Final = 10_240
"""What macOS gives at the most, where it says that there is no limit."""


def descriptors() -> int:
    """How many this process may have; asks the system for as many as it is allowed."""
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
    """How many descriptors this process has open now; 0 where the system does not say."""
    for place in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return sum(1 for _ in pathlib.Path(place).iterdir())
    return 0


def connections_within(files: int, held: int) -> int:
    """How many connections fit where `files` descriptors are allowed, of which `held` are in use or spoken for."""
    return files - max(held + LEAST_RESERVED, min(RESERVED, files // 4))


def files_for(connections: int, held: int) -> int:
    """The limit of descriptors from which on `connections_within` gives so many."""
    quarter_reserved = -(-4 * connections // 3)
    return max(connections + held + LEAST_RESERVED, min(quarter_reserved, connections + RESERVED))


class ConnectionAdmission:
    """Counts by descriptor."""

    def __init__(self, settings: TransportSettings, now: float) -> None:
        fits = connections_within(descriptors(), 0)
        self.limit = max(1, min(settings.max_connections, fits))
        self.arrivals = ArrivalLimits(settings, now)
        self.turned_away = 0
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def came(self, descriptor: int, now: float) -> None:
        """A connection was accepted."""
        self._open.add(descriptor)
        if len(self._open) > self.limit or not self._is_slow(descriptor, now):
            self.turned_away += 1
            _with_connection(descriptor, lambda found: found.shutdown(socket.SHUT_RDWR))

    def _is_slow(self, descriptor: int, now: float) -> bool:
        """Whether it may come in by the rates. One that is gone already counts for nobody."""
        places: list[object] = []
        _with_connection(descriptor, lambda found: places.append(found.getpeername()))
        address = str(places[0][0]) if places and isinstance(places[0], tuple) else ""
        return not places or self.arrivals.opens(address, now)

    def went(self, descriptor: int) -> None:
        """It is gone."""
        self._open.discard(descriptor)


def _with_connection(descriptor: int, act: Callable[[socket.socket], object]) -> None:
    """Act on libzmq's connection, by a descriptor of our own; nothing happens when it is gone."""
    with contextlib.suppress(OSError):
        try:
            own = os.dup(descriptor)
        except OSError as error:
            # Many came at once and took the last ones: these are to be hung up above all.
            if error.errno == errno.EMFILE:
                _with_borrowed(descriptor, act)
            return
        try:
            connection = socket.socket(fileno=own)
        except OSError:  # no socket, and so still ours to close
            os.close(own)
            return
        # Closed once, whatever `act` raises: by a second time the number may be that of a file, or of one of libzmq's own, which would end the process.
        with connection:
            act(connection)


def _with_borrowed(descriptor: int, act: Callable[[socket.socket], object]) -> None:
    """The same without a descriptor of our own, where there is none left. An interrupt in here would close libzmq's."""
    connection = socket.socket(fileno=descriptor)
    try:
        act(connection)
    finally:
        connection.detach()

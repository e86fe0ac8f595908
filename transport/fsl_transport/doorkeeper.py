"""How many connections a listener has, how fast new ones come, and which one is too many.

libzmq takes every connection that the system has a descriptor for, and when there are none left, our own files cannot be opened either. Its
socket monitor tells of each connection by its descriptor; one that is too many is shut down there, which libzmq sees as the other
side hanging up. By then the number may belong to something else: a file is not harmed (it is no socket), and the newest
connections are those that are too many anyhow.

Connections that stand stay: a flood keeps newcomers out, not those who are here. How fast they may come says ``gate.ArrivalGate``. libzmq does its
part of a handshake in a thread of its own, so that some of those that come too fast have got their first answer when they are hung up.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from fsl_transport.gate import ArrivalGate
from fsl_transport.settings import TransportSettings

RESERVED: Final = 512
"""Descriptors that are not for connections: files of the run, pipes, our own dialling."""
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


class Doorkeeper:
    """Counts by descriptor."""

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self.limit = max(1, min(settings.max_connections, descriptors() - RESERVED))
        self.arrivals = ArrivalGate(settings, now)
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
        own = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=own)
        except OSError:  # no socket, and so still ours to close
            os.close(own)
            return
        # Closed once, whatever `act` raises: by a second time the number may be that of a file, or of one of libzmq's own, which would end the process.
        with connection:
            act(connection)

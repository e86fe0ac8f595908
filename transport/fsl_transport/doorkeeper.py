"""How many connections a listener has, and which one is too many.

libzmq takes every connection that the system has a descriptor for, and when there are none left, our own files cannot be opened either. Its
socket monitor tells of each connection by its descriptor; one that is too many is shut down there, which libzmq sees as the other
side hanging up. By then the number may belong to something else: a file is not harmed (it is no socket), and the newest
connections are those that are too many anyhow.

Connections that stand stay: a flood keeps newcomers out, not those who are here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

RESERVED: Final = 512
"""Descriptors that are not for connections: files of the run, pipes, our own dialling."""


def descriptors() -> int:
    """How many this process may have; asks the system for as many as it is allowed."""
    try:
        import resource
    except ImportError:  # a system without them
        return 2048
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft >= 0 else 1 << 20


class Doorkeeper:
    """Counts by descriptor."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, min(limit, descriptors() - RESERVED))
        self.turned_away = 0
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def came(self, descriptor: int) -> None:
        """A connection was accepted."""
        self._open.add(descriptor)
        if len(self._open) > self.limit:
            self.turned_away += 1
            _hang_up(descriptor)

    def went(self, descriptor: int) -> None:
        """It is gone."""
        self._open.discard(descriptor)


def _hang_up(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        own = os.dup(descriptor)
        try:
            with socket.socket(fileno=own) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(own)

"""The errors of the transport room.

    TransportError
    +-- PeerError     the other side sent something it must not send: it loses its session, this node goes on
    +-- LocalError    this process used the library wrongly, or the machine refused (port in use)

A failing network is no error: it is an event (see ``events.py``).
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of everything this package raises on purpose."""


class PeerError(TransportError):
    """The peer's bytes break the protocol. Costs the peer its session, never this node its life."""


class LocalError(TransportError):
    """Our own misuse: a bad argument, an unknown peer, a port that is taken."""

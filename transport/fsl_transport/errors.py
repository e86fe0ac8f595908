"""Errors of the transport.

    TransportError
    +-- PeerError     the peer broke the protocol: its session ends, this node continues
    +-- LocalError    this process misused the library, or the machine refused (port in use)

A failing network is not an error: it is reported as an event (``events.py``).
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of every exception that this package raises on purpose."""


class PeerError(TransportError):
    """The peer's bytes break the protocol. Ends the peer's session, never this process."""


class LocalError(TransportError):
    """Misuse by this process: a bad argument, an unknown peer, a port that is taken."""

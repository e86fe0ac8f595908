"""What the client's machine is made of: its rules, and a version that it holds. Pure."""

from __future__ import annotations

from attrs import frozen

SERVER = ""  # a client has one peer
_LOST = {
    "expired": "the server does not answer",
    "reset": "the server restarted",
    "bye": "the server said goodbye",
    "protocol": "the server sent what no server sends",
    "revoked": "the server does not let this key in any more",
}

ANSWER_S = 2.0
"""So long a server that is there may take to answer a hello, before its loss is told."""

MOMENT_S = 0.1
"""Too short a wait to be worth one."""

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_RELAUNCH = 64


@frozen
class ClientRules:
    """Times in seconds."""

    reoffer_s: float = 5.0
    drain_s: float = 10.0
    """At the end: for the training thread, for a session, and for a transfer to begin."""
    stalled_s: float = 60.0
    """At the end: for a transfer to advance. Its receiver tells what it wrote in steps of up to 2 MiB."""
    drain_cap_s: float = 3600.0
    """At the end: for everything together."""
    goodbye_s: float = 2.0
    """Before a deadline of others: to say goodbye, and for the process to end by itself."""


@frozen
class Held:
    """A version and the digest of its weights."""

    version: int = -1
    digest: str = ""


def lost_words(reason: str) -> str:
    """What became of the server, for people; `reason` is the transport's."""
    return _LOST.get(reason, f"the server is away ({reason})")

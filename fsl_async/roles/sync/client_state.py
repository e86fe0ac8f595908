"""A version that a client holds, and its times and exit codes. Pure."""

from __future__ import annotations

from attrs import frozen

SERVER = ""  # a client has one peer
_LOST = {
    "expired": "the parameter server does not answer",
    "reset": "the parameter server restarted",
    "bye": "the parameter server ended the session",
    "protocol": "the parameter server violated the protocol",
    "revoked": "the parameter server no longer accepts this key",
}

ANSWER_S = 2.0
"""How long the parameter server may take to answer a hello before its loss is reported."""

VIOLATIONS = 3
"""How often the parameter server may end the session because of what this client sends. The same
message is sent in each new session, so more of them end the same way."""

LOSSES = 3
"""How many lost sessions a client that has ended training waits after, for another one."""

MOMENT_S = 0.1
"""Shorter waits are left out."""

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_RELAUNCH = 64

REOFFER_S = 5.0
"""After that, a delta or a fetch that failed is offered again."""

DRAIN_S = 10.0
"""Wait at the end for the training thread, for a session, and for a transfer to begin."""

GOODBYE_S = 2.0
"""Time before a deadline of others: to say goodbye and to end the process."""


@frozen
class Held:
    """A version and the digest of its weights."""

    version: int = -1
    digest: str = ""


def lost_text(reason: str) -> str:
    """Why the session was lost, for people; `reason` is the transport's."""
    return _LOST.get(reason, f"the parameter server is away ({reason})")

"""What a listener answers to those who have no session."""

from __future__ import annotations

from typing import Final

from fsl_transport.session import frames
from fsl_transport.session.frames import Foreign

SUPERSEDED: Final = "superseded"
REVOKED: Final = "revoked"
"""The reason of a BYE to somebody whose key is not allowed any more: there is no use in coming back."""


def unknown_head(session: bytes) -> bytes:
    """UNKNOWN."""
    return frames.pack((frames.UNKNOWN, session), frames.TEXT_LIMIT)


def refusal_head(incarnation: int, attempt: int, code: str, text: str, *, known: int) -> bytes:
    """REFUSE."""
    return frames.pack(
        (
            frames.REFUSE,
            frames.PROTOCOL_VERSION,
            incarnation,
            attempt,
            frames.short(code),
            frames.short(text),
            known,
        ),
        16 * frames.TEXT_LIMIT,
    )


def protocol_refusal(message: Foreign) -> bytes:
    """REFUSE for a HELLO of another protocol version."""
    text = (
        f"the listener speaks protocol {frames.PROTOCOL_VERSION}, the dialer {message.version}:"
        " install the same release on both sides"
    )
    return refusal_head(message.incarnation, message.attempt, "protocol", text, known=0)

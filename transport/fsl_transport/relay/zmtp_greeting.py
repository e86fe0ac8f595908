"""The greeting of a ZMTP connection: the only bytes that a relay looks at. Pure.

Layout (ZMTP 3.1, rfc.zeromq.org/spec/37):

    0..9    0xFF, padding, 0x7F        signature, sent at once by both sides
    10, 11  version, major and minor
    12..31  mechanism, ASCII, padded with zeros: NULL, PLAIN, CURVE, GSSAPI
    32      as-server
    33..63  zeros

libzmq sends the major version once it has the other side's signature, and the rest once it has the
other side's major version. So a relay that passes a client's signature on and holds the rest back
until it is complete stops neither side.
"""

from __future__ import annotations

from typing import Final

SIGNATURE_BYTES: Final = 10
GREETING_BYTES: Final = 64
CURVE: Final = "CURVE"
_MECHANISMS: Final = frozenset({"NULL", "PLAIN", CURVE, "GSSAPI"})


def is_signature(data: bytes) -> bool:
    """Whether these are the first ten bytes of a ZMTP connection, version 1 or later."""
    return len(data) == SIGNATURE_BYTES and data[0] == 0xFF and data[9] == 0x7F


def mechanism_of(greeting: bytes) -> str:
    """Return the mechanism that a whole greeting names, or "" if it is no greeting of ZMTP 3."""
    if len(greeting) != GREETING_BYTES or not is_signature(greeting[:SIGNATURE_BYTES]):
        return ""
    if greeting[10] < 3:
        return ""
    name = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
    return name if name in _MECHANISMS else ""

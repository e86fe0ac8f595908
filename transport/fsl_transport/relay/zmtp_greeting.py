"""The first 64 bytes of a ZeroMQ connection: is it one, and how does it protect what follows? Pure.

They are the only bytes that a relay looks at. Layout: ZMTP 3.1 (rfc.zeromq.org/spec/37), "greeting":

    0..9    0xFF, padding, 0x7F        signature, sent at once by both sides
    10, 11  version, major and minor   sent when the other's signature is there
    12..31  mechanism, ASCII, padded with zeros: NULL, PLAIN, CURVE, GSSAPI
    32      as-server
    33..63  zeros
"""

from __future__ import annotations

from typing import Final

SIGNATURE_BYTES: Final = 10
OPEN_BYTES: Final = 12
"""Signature and version: a side may wait for these of the other one before it says its mechanism."""
GREETING_BYTES: Final = 64
CURVE: Final = "CURVE"
_NAMES: Final = frozenset({"NULL", "PLAIN", "CURVE", "GSSAPI"})


def is_signature(first: bytes | bytearray) -> bool:
    """Whether these are the first ten bytes of a ZMTP connection of version 1 or later."""
    return len(first) == SIGNATURE_BYTES and first[0] == 0xFF and first[9] == 0x7F


def mechanism_of(greeting: bytes | bytearray) -> str:
    """The mechanism that a whole greeting announces, or "" for what is no greeting of ZMTP 3."""
    if len(greeting) != GREETING_BYTES or not is_signature(greeting[:SIGNATURE_BYTES]):
        return ""
    if greeting[10] < 3:
        return ""
    name = bytes(greeting[12:32]).rstrip(b"\0").decode("ascii", "replace")
    return name if name in _NAMES else ""

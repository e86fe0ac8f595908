"""What keeps the frames of a message together, whoever holds frames back on the way. Pure.

CURVE proves of each frame who sent it and that it is newer than the one before on its connection; not that none is missing (the nonces of RFC 26 grow, libzmq
accepts gaps). So a relay without any key could leave out the payload of one chunk and the head of the next, and the first head would be
followed by the second payload, both genuine. Behind a payload therefore comes its head once more:

    head, payload, 0xC1 + head

No two chunks of a session have the same head (``frames.py``: stream, round, index), and frames never come in another order: between twice the
same head there can only be the payload that was sent there. What does not fit is dropped as if it were lost, and sessions and streams mend that.
No msgpack begins with 0xC1, so an end that is alone is known as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MARK: Final = b"\xc1"


def end_of(head: bytes | bytearray | memoryview) -> bytes:
    """What follows the payload of a message with this head."""
    return _MARK + head


def is_whole(parts: Sequence[bytes | memoryview]) -> bool:
    """Whether these frames are one message as it was sent: a head alone, or head, payload and end."""
    if len(parts) == 1:
        return parts[0][:1] != _MARK
    return len(parts) == 3 and parts[2] == end_of(parts[0])

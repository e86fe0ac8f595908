"""Which connections a relay serves, and when a relay that drains may end. Pure.

Limits count the connections that exist at one time, in all and of one address, which gets half of
them at most. How fast an address connects, and which addresses may, is for a firewall to decide
(docs/SECURITY.md).
"""

import enum
from collections import Counter
from typing import Final

QUIET_BYTES: Final = 64 * 1024
"""What heartbeats may carry on all connections between two looks at a relay that drains."""


class Drop(enum.StrEnum):
    """Why a relay closes a connection, in the words of its reports."""

    FULL = "full"
    SILENT = "no greeting"
    NOT_ZMTP = "not ZMTP"
    UNENCRYPTED = "unencrypted"
    NO_SERVER = "no server"


class Admission:
    """Counts the connections of a relay that may have `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.per_address = max(1, limit // 2)
        self.connections = 0
        self._of: Counter[str] = Counter()
        self._drained_bytes = -1

    @property
    def addresses(self) -> int:
        """How many addresses have a connection."""
        return len(self._of)

    def accept(self, address: str) -> str:
        """Count a connection and return "", or return why there is no place for it."""
        if self.connections >= self.limit:
            return f"{self.limit} connections already"
        if self._of[address] >= self.per_address:
            return f"{self.per_address} connections of {address} already"
        self.connections += 1
        self._of[address] += 1
        return ""

    def end(self, address: str) -> None:
        """Count a connection no more."""
        self.connections -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def may_end(self, up: int, down: int, held: int) -> bool:
        """Whether a relay that drains may end, given the bytes of all connections so far.

        It may when it has none, or when nothing is held and no more than heartbeats passed since
        the last call: transfers get time to finish, and what is cut off resumes at the chunk.
        """
        before, self._drained_bytes = self._drained_bytes, up + down
        is_quiet = 0 <= before >= up + down - QUIET_BYTES and not held
        return is_quiet or not self.connections

"""Byte credit: how a slow writer holds a fast sender without a queue in between.

The receiver grants absolute totals ("up to byte 8,388,608 of this stream"), so a grant that is
lost, repeated or late does no harm: the highest one counts (the idea of MAX_STREAM_DATA, RFC
9000 section 4.1). Bytes count once, by their place in the stream: a chunk that is sent again
takes no new credit.

    Granting   consumed <= received <= limit;  limit = consumed + window, raised in steps of a
               quarter of the window, so that small chunks do not cost one grant each, but
               never so late that the largest chunk could not go (both sides would wait);
               what is consumed is told as often also where the limit stays, because the sender
               has a limit of its own for what is not; how wide it is
               is up to the receiver's machine (``chunks.py``)
    Spending   sent <= limit; a resume sets sent back to what the receiver holds
"""

from __future__ import annotations

from typing import Final

STEP_LIMIT_BYTES: Final = 8 * 1024 * 1024
"""A window of any size is raised at least so often."""


class Granting:
    """The receiver's half."""

    __slots__ = ("_told", "consumed", "largest", "limit", "received")

    def __init__(self, window_bytes: int, largest_chunk_bytes: int) -> None:
        self.largest = largest_chunk_bytes
        self.received = 0
        self.consumed = 0
        self.limit = window_bytes
        self._told = 0

    def fits(self, size: int) -> bool:
        """Whether ``size`` more bytes are within the credit."""
        return self.received + size <= self.limit

    def receive(self, size: int) -> None:
        """``size`` bytes came and wait to be written."""
        self.received += size

    def widen(self, window_bytes: int) -> bool:
        """Raise the limit to a wider window at once. True when it rose."""
        target = self.consumed + window_bytes
        if target <= self.limit:
            return False
        self.limit = target
        return True

    def consume(self, size: int, window_bytes: int) -> bool:
        """``size`` bytes are written. True when that, or the limit, is to be told."""
        self.consumed += size
        target = self.consumed + window_bytes
        step = min(window_bytes // 4, window_bytes - self.largest, STEP_LIMIT_BYTES)
        rises = target > self.limit and target - self.limit >= step
        often = max(min(self.largest, STEP_LIMIT_BYTES), step)  # the sender may have smaller chunks
        if not rises and self.consumed - self._told < often:
            return False
        self.limit = max(self.limit, target)
        self._told = self.consumed
        return True

    @property
    def pending(self) -> int:
        """Bytes received and not yet written."""
        return self.received - self.consumed


class Spending:
    """The sender's half."""

    __slots__ = ("limit", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.limit = 0

    def grant(self, limit: int) -> None:
        """Take a new absolute limit; an older, lower one changes nothing."""
        self.limit = max(self.limit, limit)

    def resume(self, received: int, limit: int) -> None:
        """Go on after the ``received`` bytes that the other side holds."""
        self.sent = received
        self.grant(limit)

    def fits(self, size: int) -> bool:
        """Whether ``size`` more bytes are within the credit."""
        return self.sent + size <= self.limit

    @property
    def left(self) -> int:
        """Bytes that may still be sent."""
        return self.limit - self.sent

    def spend(self, size: int) -> None:
        """``size`` bytes went out."""
        self.sent += size

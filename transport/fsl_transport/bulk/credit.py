"""Byte credit: flow control between a fast sender and a slow writer, without a queue in between.

The receiver grants absolute totals ("up to byte 8,388,608 of this stream"), so a grant that is
lost, repeated or late does no harm: the highest one counts (as MAX_STREAM_DATA, RFC 9000 section
4.1). Bytes are counted by their position in the stream: a chunk that is sent again takes no new
credit.

    ReceiveCredit   consumed <= received <= limit; limit = consumed + window.
                    The limit rises in steps of a quarter of the window, so that small chunks do not
                    cost one grant each, but always early enough for the largest chunk: otherwise
                    both sides would wait. ``consumed`` is reported as often even where the limit
                    stays, because the sender also limits what is sent and not yet written.
                    ``chunks.ReceiveStream`` chooses the window.
    SendCredit      sent <= limit. A resume sets ``sent`` back to what the receiver holds.
"""

from __future__ import annotations

from typing import Final

STEP_LIMIT_BYTES: Final = 8 * 1024 * 1024
"""The limit of a window of any size is raised at least this often."""


class ReceiveCredit:
    """Credit that a receiver grants."""

    __slots__ = ("_reported", "consumed", "largest", "limit", "received")

    def __init__(self, window_bytes: int, largest_chunk_bytes: int) -> None:
        self.largest = largest_chunk_bytes
        self.received = 0
        self.consumed = 0
        self.limit = window_bytes
        self._reported = 0

    def covers(self, size: int) -> bool:
        """Whether the credit covers ``size`` more bytes."""
        return self.received + size <= self.limit

    def receive(self, size: int) -> None:
        """``size`` bytes arrived and wait to be written."""
        self.received += size

    def widen(self, window_bytes: int) -> bool:
        """Raise the limit to a wider window at once. True if it rose."""
        target = self.consumed + window_bytes
        if target <= self.limit:
            return False
        self.limit = target
        return True

    def consume(self, size: int, window_bytes: int) -> bool:
        """``size`` bytes are written. True if a CREDIT is due."""
        self.consumed += size
        target = self.consumed + window_bytes
        step = min(window_bytes // 4, window_bytes - self.largest, STEP_LIMIT_BYTES)
        rises = target > self.limit and target - self.limit >= step
        # The sender's largest chunk, and so its own limit, may be smaller than the receiver's.
        report_step = max(min(self.largest, STEP_LIMIT_BYTES), step)
        if not rises and self.consumed - self._reported < report_step:
            return False
        self.limit = max(self.limit, target)
        self._reported = self.consumed
        return True

    @property
    def pending(self) -> int:
        """Bytes received and not yet written."""
        return self.received - self.consumed


class SendCredit:
    """Credit that a sender was granted."""

    __slots__ = ("limit", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.limit = 0

    def grant(self, limit: int) -> None:
        """Take a new absolute limit; a lower, older one has no effect."""
        self.limit = max(self.limit, limit)

    def resume(self, received: int, limit: int) -> None:
        """Continue after the ``received`` bytes that the receiver holds."""
        self.sent = received
        self.grant(limit)

    def covers(self, size: int) -> bool:
        """Whether the credit covers ``size`` more bytes."""
        return self.sent + size <= self.limit

    @property
    def left(self) -> int:
        """Bytes that may still be sent."""
        return self.limit - self.sent

    def spend(self, size: int) -> None:
        """``size`` bytes were sent."""
        self.sent += size

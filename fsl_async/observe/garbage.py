"""How many messages were not of this program, for the journal."""

from __future__ import annotations

import asyncio

import fsl_transport as tp
from fsl_async.observe.reporter import Reporter

GARBAGE_EVERY_S = 1.0


class GarbageWatch:
    """Notes in the journal how many messages were not of this program, whenever there are more."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, endpoint: tp.ListenerEndpoint, journal: Reporter
    ) -> None:
        self._loop, self._endpoint, self._journal = loop, endpoint, journal
        self._seen = 0
        self._timer = loop.call_later(GARBAGE_EVERY_S, self._look)

    def _look(self) -> None:
        if self._endpoint.garbage > self._seen:
            self._seen = self._endpoint.garbage
            self._journal.note("unreadable_messages", self._loop.time(), garbage=self._seen)
        self._timer = self._loop.call_later(GARBAGE_EVERY_S, self._look)

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()

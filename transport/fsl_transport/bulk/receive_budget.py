"""The room of an endpoint: its memory for what came in streams and is not written yet. Who gets how much of it, and who waits for some. Pure.

All streams that come in, over all sessions, share ``budget_bytes``. A stream's credit is a promise of a part of it, made when nothing is known of the writer, and cannot be taken back.
So promises may be more than there is, and what then finds no room is dropped (docs/adr/0098).

Rules
  * All streams of a session may have ``1 / SESSION_PART`` of the budget as credit, or ``window_bytes`` where that is more, and each a chunk: what a peer begins and does not finish leaves room for the others.
  * A stream may have ``window_bytes``, or twice what its line needs, within its share and ``window_limit_bytes``. What all of them begin with beyond ``window_bytes`` is ``1 / EXTRA_PART`` of the budget at the most.
  * A chunk that comes into an empty room always fits; another one within the budget.
  * Whose chunk did not fit waits, and is asked for it when no more than half the room is taken, or when a chunk fits and nothing is being written, because then nobody else makes room. The longest
    waiting first, one at a time: what it writes asks the next one, and time does, since who was asked may never answer.
  * Those who found room renew their credit, and might never leave half of it. So with time room for one chunk is kept for the longest waiting, who is asked as soon as it is there. It is kept until that chunk comes, ``KEPT_S`` at the most.
  * Who was asked ``ASKED_IN_VAIN_LIMIT`` times in a row, and nothing new came of it, is left to its stall timer: its sender takes twice as many for an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fsl_transport.settings import TransportSettings

EXTRA_PART: Final = 4
SESSION_PART: Final = 4
ASKED_IN_VAIN_LIMIT: Final = 32
"""Half of ``chunks.RESUMES_LIMIT``."""
KEPT_S: Final = 5.0


class Reservation:
    """What the room remembers of one stream."""

    __slots__ = ("_asked_at", "_asked_in_vain", "extra_bytes")

    def __init__(self) -> None:
        self.extra_bytes = 0  # of credit that it began with
        self._asked_at = -1  # the chunk that it needed
        self._asked_in_vain = 0  # times in a row

    def is_worth_asking(self, chunk: int) -> bool:
        """Whether to ask once more, for ``chunk``."""
        return chunk > self._asked_at or self._asked_in_vain < ASKED_IN_VAIN_LIMIT

    def asked(self, chunk: int) -> None:
        """It was asked for ``chunk``."""
        self._asked_in_vain = 1 if chunk > self._asked_at else self._asked_in_vain + 1
        self._asked_at = chunk


class ReceiveBudget:
    """Counts bytes; ``taken_bytes`` are received and not written, of which the writers have ``writing_bytes``."""

    __slots__ = (
        "_kept_for",
        "_kept_until",
        "_waiting",
        "extra_bytes",
        "streams",
        "taken_bytes",
        "writing_bytes",
    )

    def __init__(self) -> None:
        self.streams = 0  # that come in and are accepted
        self.taken_bytes = 0
        self.writing_bytes = 0
        self.extra_bytes = 0
        self._kept_for: Any = None
        self._kept_until = 0.0
        self._waiting: dict[Any, Callable[[], bool]] = {}

    @property
    def waiting(self) -> list[Any]:
        """Who waits, the longest first."""
        return list(self._waiting)

    def window_limit(self, settings: TransportSettings, others_bytes: int = 0) -> int:
        """What a window may be now: all that come in share the budget, and those of a session its part. ``others_bytes``: credit of the session's other streams."""
        share = settings.budget_bytes // max(1, self.streams)
        left = max(settings.budget_bytes // SESSION_PART, settings.window_bytes) - others_bytes
        share = max(settings.chunk_limit_bytes, min(share, left))
        return min(settings.window_limit_bytes, share)

    def window(self, settings: TransportSettings, line_bytes: int, others_bytes: int) -> int:
        """The credit for a line that needs so much under way: that twice, since what waits for a piece that was lost is not under way any more."""
        limit = self.window_limit(settings, others_bytes)
        return min(max(settings.window_bytes, 2 * line_bytes), limit)

    def first_window(
        self,
        settings: TransportSettings,
        line_bytes: int,
        others_bytes: int,
        reservation: Reservation,
    ) -> int:
        """The credit that a stream begins with."""
        least = min(settings.window_bytes, self.window_limit(settings, others_bytes))
        left = settings.budget_bytes // EXTRA_PART - self.extra_bytes
        wanted = self.window(settings, line_bytes, others_bytes)
        reservation.extra_bytes = max(0, min(wanted - least, left))
        self.extra_bytes += reservation.extra_bytes
        return least + reservation.extra_bytes

    def fits(self, settings: TransportSettings, size: int, stream: Any) -> bool:
        """Whether a chunk of ``stream`` of ``size`` bytes may come in."""
        kept = self._kept_for is not None and self._kept_for is not stream
        size += settings.chunk_limit_bytes if kept else 0
        return not self.taken_bytes or self.taken_bytes + size <= settings.budget_bytes

    def came(self, stream: Any) -> None:
        """A chunk of ``stream`` came in."""
        if self._kept_for is stream:
            self._kept_for = None

    def wait(self, stream: Any, ask: Callable[[], bool]) -> None:
        """A chunk of ``stream`` did not fit. ``ask`` asks its sender for it, or returns False where that is not needed any more."""
        self._waiting.setdefault(stream, ask)

    def has_waiting(self, stream: Any) -> bool:
        """Whether ``stream`` waits."""
        return stream in self._waiting

    def leave(self, stream: Any, reservation: Reservation) -> None:
        """A stream is over."""
        self.extra_bytes -= reservation.extra_bytes
        reservation.extra_bytes = 0
        self._waiting.pop(stream, None)
        self.came(stream)

    def look(self, settings: TransportSettings, now: float) -> None:
        """Time has passed: keep room for the longest waiting, and ask where there is some."""
        if self._kept_for is not None and now > self._kept_until:
            self._kept_for = None
        if self._kept_for is None and self._waiting:
            self._kept_for = next(iter(self._waiting))
            self._kept_until = now + KEPT_S
        self.use(settings)

    def use(self, settings: TransportSettings) -> None:
        """Something was written or given up: ask the next one, where there is room."""
        while self._waiting:
            stream = (
                self._kept_for if self._kept_for in self._waiting else next(iter(self._waiting))
            )
            if not self._may_ask(settings, stream):
                return
            if self._waiting.pop(stream)():
                return

    def _may_ask(self, settings: TransportSettings, stream: Any) -> bool:
        if self._kept_for is stream or not self.writing_bytes:
            return self.fits(settings, settings.chunk_limit_bytes, stream)
        return self.taken_bytes <= settings.budget_bytes // 2

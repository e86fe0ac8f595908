"""Memory budget of an endpoint for incoming streams. Pure.

Divides ``receive_budget_bytes`` among all incoming streams, over all sessions; streams that do not
fit queue in arrival order. A stream's credit is a promise of part of the budget. It is made before
anything is known of the writer and cannot be taken back, so promises may exceed the budget. What
then does not fit is dropped and requested again later (docs/adr/0064).

Rules
  * The streams of one session together get at most ``1 / SESSION_PART`` of the budget as credit, or
    ``window_bytes`` where that is more, and each at least one chunk: a peer that starts streams and
    does not finish them leaves memory for the others.
  * A stream's window is ``window_bytes``, or twice what its path needs in flight, within its share
    and ``window_limit_bytes``. Initial windows beyond ``window_bytes`` take at most
    ``1 / EXTRA_PART`` of the budget, over all streams.
  * A chunk always fits if nothing else is held; otherwise it fits within the budget.
  * A stream whose chunk did not fit waits. It is requested when at most half the budget is used, or
    when a chunk fits and nothing is being written, because then nothing else frees memory. The
    longest waiting is first, one at a time: its writes request the next one, and so does the timer,
    since a requested chunk may never arrive.
  * Streams that are being received renew their credit, and might never leave half of the budget
    free. So the timer reserves space for one chunk for the longest waiting stream, which is
    requested as soon as the space is free. The reservation lasts until the chunk arrives, at most
    ``RESERVATION_S``.
  * A stream requested ``FRUITLESS_REQUESTS_LIMIT`` times in a row without a new chunk is left to
    its stall timer: its sender treats twice as many as an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsl_transport.settings import TransportSettings

EXTRA_PART: Final = 4
SESSION_PART: Final = 4
FRUITLESS_REQUESTS_LIMIT: Final = 32
"""Half of ``chunks.RESUMES_LIMIT``."""
RESERVATION_S: Final = 5.0


class Reservation:
    """One stream's part of the budget, and the requests made for it."""

    __slots__ = ("_fruitless", "_requested", "extra_bytes")

    def __init__(self) -> None:
        self.extra_bytes = 0  # of its initial window beyond window_bytes
        self._requested = -1  # the chunk that was requested last
        self._fruitless = 0  # requests in a row

    def may_request(self, chunk: int) -> bool:
        """Whether to request ``chunk`` once more."""
        return chunk > self._requested or self._fruitless < FRUITLESS_REQUESTS_LIMIT

    def requested(self, chunk: int) -> None:
        """``chunk`` was requested."""
        self._fruitless = 1 if chunk > self._requested else self._fruitless + 1
        self._requested = chunk


class ReceiveBudget:
    """Counts the bytes of all incoming streams of one endpoint and queues those that do not fit.

    ``used_bytes`` are received and not written, ``writing_bytes`` of them with the writers.
    ``eager_bytes`` arrived before their stream was accepted and are counted apart.
    """

    __slots__ = (
        "_reserved_for",
        "_reserved_until",
        "_settings",
        "_waiting",
        "eager_bytes",
        "extra_bytes",
        "streams",
        "used_bytes",
        "writing_bytes",
    )

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self.streams = 0  # incoming and accepted
        self.used_bytes = 0
        self.writing_bytes = 0
        self.eager_bytes = 0
        self.extra_bytes = 0
        self._reserved_for: Reservation | None = None
        self._reserved_until = 0.0
        self._waiting: dict[Reservation, Callable[[], bool]] = {}

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings from now on."""
        self._settings = settings

    @property
    def waiting(self) -> list[Reservation]:
        """Reservations of the streams that wait, the longest waiting first."""
        return list(self._waiting)

    def window_limit(self, others_bytes: int = 0) -> int:
        """Maximum window of a stream now. All streams share the budget, a session's its part.

        ``others_bytes`` is the credit of the other streams of its session.
        """
        settings = self._settings
        budget = settings.receive_budget_bytes
        share = budget // max(1, self.streams)
        left = max(budget // SESSION_PART, settings.window_bytes) - others_bytes
        share = max(settings.chunk_limit_bytes, min(share, left))
        return min(settings.window_limit_bytes, share)

    def window(self, target_bytes: int, others_bytes: int) -> int:
        """Window for a path that needs ``target_bytes`` in flight.

        Twice that, because chunks that wait for a lost piece are no longer in flight.
        """
        limit = self.window_limit(others_bytes)
        return min(max(self._settings.window_bytes, 2 * target_bytes), limit)

    def first_window(self, reservation: Reservation, target_bytes: int, others_bytes: int) -> int:
        """Initial window of a stream."""
        settings = self._settings
        least = min(settings.window_bytes, self.window_limit(others_bytes))
        left = settings.receive_budget_bytes // EXTRA_PART - self.extra_bytes
        wanted = self.window(target_bytes, others_bytes)
        reservation.extra_bytes = max(0, min(wanted - least, left))
        self.extra_bytes += reservation.extra_bytes
        return least + reservation.extra_bytes

    def admits(self, reservation: Reservation, size: int) -> bool:
        """Whether a chunk of ``size`` bytes of a stream fits now."""
        settings = self._settings
        if self._reserved_for is not None and self._reserved_for is not reservation:
            size += settings.chunk_limit_bytes
        return not self.used_bytes or self.used_bytes + size <= settings.receive_budget_bytes

    def on_chunk(self, reservation: Reservation) -> None:
        """A chunk of a stream was taken in."""
        if self._reserved_for is reservation:
            self._reserved_for = None

    def wait(self, reservation: Reservation, request: Callable[[], bool]) -> None:
        """A chunk of a stream did not fit.

        ``request`` requests it from its sender, or returns False if that is no longer necessary.
        """
        self._waiting.setdefault(reservation, request)

    def is_waiting(self, reservation: Reservation) -> bool:
        """Whether a stream waits."""
        return reservation in self._waiting

    def release(self, reservation: Reservation) -> None:
        """A stream is over."""
        self.extra_bytes -= reservation.extra_bytes
        reservation.extra_bytes = 0
        self._waiting.pop(reservation, None)
        self.on_chunk(reservation)

    def handle_timer(self, now: float) -> None:
        """Reserve space for the longest waiting stream, and request what fits."""
        if self._reserved_for is not None and now > self._reserved_until:
            self._reserved_for = None
        if self._reserved_for is None and self._waiting:
            self._reserved_for = next(iter(self._waiting))
            self._reserved_until = now + RESERVATION_S
        self.request_next()

    def request_next(self) -> None:
        """Memory may have become free: request the next waiting stream if it fits."""
        while self._waiting:
            reservation = self._reserved_for
            if reservation not in self._waiting:
                reservation = next(iter(self._waiting))
            if not self._may_request(reservation):
                return
            if self._waiting.pop(reservation)():
                return

    def _may_request(self, reservation: Reservation) -> bool:
        if self._reserved_for is reservation or not self.writing_bytes:
            return self.admits(reservation, self._settings.chunk_limit_bytes)
        return self.used_bytes <= self._settings.receive_budget_bytes // 2

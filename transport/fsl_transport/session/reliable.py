"""One established session: ordered control messages, heartbeats, expiry. The same on both sides.

The two sides differ only in that the dialer sends heartbeats on its own (``beats``). Pure, like
``session.py``, whose tables define when a session exists.

Rules
  * ``send`` numbers a message, keeps its packed head until it is acknowledged, and sends it at once
    while fewer than ``control_window`` are unacknowledged; the rest waits in a backlog.
  * Every DATA, BEAT and ACK carries the cumulative acknowledgement. A lone ACK is sent after
    ``ack_after_s``, after ``ACK_EVERY`` messages, and at once if a message is missing (gap) or
    arrived twice (an acknowledgement was lost).
  * Go-back-N: all unacknowledged messages are sent again, with their old heads, after
    ``retransmit_after_s`` (doubling) plus the time that their bytes take on a slow path; and once
    per reported gap.

    event                     effects
    DATA next in order        the message goes up; an acknowledgement is due
    DATA beyond               ACK with gap, at most once per missing number
    DATA old                  acknowledgement at once
    BEAT                      the message goes up (``asks`` requests a heartbeat in return)
    ACK                       acknowledged messages leave; the backlog moves up
    timer                     retransmission, ACK, BeatDue, or ``is_expired``
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from attrs import frozen

from fsl_transport.errors import PeerError
from fsl_transport.events import Body
from fsl_transport.session import frames
from fsl_transport.session.frames import Ack, Beat, Data
from fsl_transport.settings import TransportSettings

ACK_EVERY: Final = 32
"""A lone ACK is sent after this many messages, so that a fast one-way flow does not stall."""
BEAT_LIMIT_BYTES: Final = 64 * 1024
PAYLOAD_AGE_BEATS: Final = 2
"""A heartbeat is sent at least once per this many intervals, whatever else was sent."""


@frozen
class BeatDue:
    """The endpoint gets the payload from the application, then calls ``beat``."""


BEAT_DUE: Final = BeatDue()


class Session:
    """One side of an established session. Heads to send are appended to ``outbox``."""

    __slots__ = (
        "_ack_at",
        "_ack_due",
        "_backlog",
        "_backlog_bytes",
        "_beat_at",
        "_beat_every_s",
        "_control_at",
        "_gap_reported",
        "_received",
        "_received_at",
        "_repaired_from",
        "_retransmit_at",
        "_retransmit_s",
        "_sent",
        "_settings",
        "_unacked",
        "_unacked_bytes",
        "identity",
        "is_expired",
        "outbox",
        "retransmitted",
    )

    def __init__(
        self,
        identity: bytes,
        settings: TransportSettings,
        outbox: list[bytes],
        now: float,
        *,
        beats: bool,
    ) -> None:
        self.identity = identity
        self.outbox = outbox
        self.is_expired = False
        self.retransmitted = 0
        self._settings = settings
        self._beat_every_s = settings.heartbeat_every_s if beats else math.inf
        self._control_at = now  # when control traffic last went out
        self._beat_at = now  # when a heartbeat last went out: only heartbeats carry the payload
        self._received_at = now
        self._sent = 0  # seq of the newest message sent
        self._unacked: deque[bytes] = deque()  # heads of _sent - len + 1 .. _sent
        self._unacked_bytes = 0
        self._backlog: deque[tuple[Any, ...]] = deque()
        self._backlog_bytes = 0
        self._received = 0  # seq of the newest message received in order
        self._ack_due = 0
        self._ack_at = math.inf
        self._gap_reported = 0
        self._repaired_from = 0
        self._retransmit_s = settings.retransmit_after_s
        self._retransmit_at = math.inf

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings. The caller reads ``next_deadline`` again afterwards."""
        self._settings = settings
        if self._beat_every_s < math.inf:
            self._beat_every_s = settings.heartbeat_every_s

    def send(self, op: int, fields: tuple[Any, ...], now: float) -> None:
        """Send one control message reliably. ``LocalError`` if it cannot be packed."""
        if len(self._unacked) >= self._settings.control_window or self._backlog:
            # Packed twice, which is rare: its size is needed now, and errors must be raised now.
            size = len(self._pack(op, fields, 0))
            self._backlog.append((size, op, fields))
            self._backlog_bytes += size
            if self._backlog_bytes > self._settings.backlog_limit_bytes:
                self.is_expired = True
            return
        self._send_now(op, fields, now)

    def beat(self, payload: Body, now: float, *, asks: bool) -> None:
        """Send a heartbeat."""
        head = frames.pack(
            (frames.BEAT, self.identity, self._received, asks, payload), BEAT_LIMIT_BYTES
        )
        self._ack_carried(now)
        self._beat_at = now
        self.outbox.append(head)

    def bye_head(self, reason: str) -> bytes:
        """Pack the BYE that ends this session."""
        return frames.pack((frames.BYE, self.identity, frames.short(reason)), 8 * frames.TEXT_LIMIT)

    def on_received(self, now: float) -> None:
        """A message of this session arrived, on any lane."""
        self._received_at = now

    def last_received_ago_s(self, now: float) -> float:
        """Seconds since anything was received from the peer."""
        return now - self._received_at

    def handle(self, message: Data | Beat | Ack, now: float) -> list[Data | Beat | Any]:
        """Handle one message of this session; return it if it goes up to the endpoint."""
        self._received_at = now
        if self._unacked or message.ack > self._sent:
            self._on_ack(message.ack, now)
        if type(message) is Ack:
            if message.gap and self._unacked:
                self._on_gap(now)
            return []
        if type(message) is Data and not self._accept(message.seq, now):
            return []
        return [message]

    def next_deadline(self) -> float:
        """Return when to call ``handle_timer``: perhaps earlier than necessary, never later."""
        if self.is_expired:
            return -math.inf
        return min(
            self._received_at + self._settings.expire_after_s,
            self._beat_due_at(),
            self._ack_at,
            self._retransmit_at,
        )

    def handle_timer(self, now: float) -> list[Any]:
        """Do what is due. Check ``is_expired`` afterwards."""
        if self.is_expired or now >= self._received_at + self._settings.expire_after_s:
            self.is_expired = True
            return []
        if now >= self._retransmit_at:
            self._retransmit_s = min(2 * self._retransmit_s, self._settings.expire_after_s)
            self._retransmit(now)
        if now >= self._beat_due_at():
            return [BEAT_DUE]  # carries the acknowledgement, if one is due
        if now >= self._ack_at:
            self._send_ack(now, gap=False)
        return []

    def _beat_due_at(self) -> float:
        """After a quiet interval; under traffic too, or the payload would grow old."""
        every_s = self._beat_every_s
        return min(self._control_at + every_s, self._beat_at + PAYLOAD_AGE_BEATS * every_s)

    def _accept(self, seq: int, now: float) -> bool:
        """Whether a DATA is next in order; schedule its acknowledgement."""
        if seq == self._received + 1:
            self._received = seq
            self._ack_due += 1
            if self._ack_due >= ACK_EVERY:
                self._send_ack(now, gap=False)
            elif self._ack_at == math.inf:
                self._ack_at = now + self._settings.ack_after_s
            return True
        if seq <= self._received:
            self._send_ack(now, gap=False)
        elif self._gap_reported != self._received + 1:
            self._gap_reported = self._received + 1
            self._send_ack(now, gap=True)
        return False

    def _on_gap(self, now: float) -> None:
        """The peer reported a gap: retransmit, once per first unacknowledged message."""
        first = self._sent - len(self._unacked) + 1
        if self._repaired_from != first:
            self._repaired_from = first
            self._retransmit(now)

    def _pack(self, op: int, fields: tuple[Any, ...], seq: int) -> bytes:
        return frames.pack(
            (frames.DATA, self.identity, seq, self._received, op, *fields),
            self._settings.control_limit_bytes,
        )

    def _send_now(self, op: int, fields: tuple[Any, ...], now: float) -> None:
        head = self._pack(op, fields, self._sent + 1)
        self._sent += 1
        self._unacked.append(head)
        self._unacked_bytes += len(head)
        if self._retransmit_at == math.inf:
            self._arm_retransmission(now)
        self._ack_carried(now)
        self.outbox.append(head)

    def _ack_carried(self, now: float) -> None:
        self._control_at = now
        self._ack_due = 0
        self._ack_at = math.inf

    def _send_ack(self, now: float, *, gap: bool) -> None:
        self._ack_carried(now)
        self.outbox.append(
            frames.pack((frames.ACK, self.identity, self._received, gap), frames.TEXT_LIMIT)
        )

    def _on_ack(self, ack: int, now: float) -> None:
        if ack > self._sent:
            raise PeerError(f"acknowledged message {ack}, only {self._sent} were sent")
        unacked = self._unacked
        gone = ack - (self._sent - len(unacked))
        if gone <= 0:
            return
        for _ in range(gone):
            self._unacked_bytes -= len(unacked.popleft())
        self._retransmit_s = self._settings.retransmit_after_s
        while self._backlog and len(unacked) < self._settings.control_window:
            size, op, fields = self._backlog.popleft()
            self._backlog_bytes -= size
            self._send_now(op, fields, now)
        if unacked:
            self._arm_retransmission(now)
        else:
            self._retransmit_at = math.inf

    def _arm_retransmission(self, now: float) -> None:
        slow_s = self._unacked_bytes / self._settings.slow_link_bytes_per_s
        self._retransmit_at = now + self._retransmit_s + slow_s

    def _retransmit(self, now: float) -> None:
        self.retransmitted += len(self._unacked)
        self.outbox.extend(self._unacked)
        self._control_at = now
        self._arm_retransmission(now)

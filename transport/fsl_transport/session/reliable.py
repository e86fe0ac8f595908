"""An established session: control messages in order, once; heartbeats; expiry. Both sides alike.

This file does not know which side it is on, save that one of the two ``beats``. It is pure like
``session.py``, whose tables say when such a session exists.

Rules
  * ``send`` numbers a message, keeps its packed head until it is acknowledged, and sends it at
    once while fewer than ``control_window`` are open; the rest waits in a backlog.
  * Every DATA, BEAT and ACK carries the cumulative acknowledgement. A lone ACK goes out after
    ``ack_after_s``, after ``ACK_EVERY`` messages, or at once when a message is missing (gap) or
    came twice (ours was lost).
  * All open messages go again, with their old heads, after ``retransmit_after_s`` (doubling) plus
    the time that the open bytes take on a slow line; and once per gap report.

    event                     effects
    DATA next in order        the message goes up; acknowledgement is owed
    DATA beyond               ACK with gap, at most once per missing number
    DATA old                  acknowledgement at once
    BEAT                      the message goes up (its ``asks`` wants ``beat`` in return)
    ACK                       open messages leave; backlog moves up
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
"""A lone ACK after this many messages, so that a fast one-way flow keeps its window open."""
BEAT_LIMIT_BYTES: Final = 64 * 1024

PAYLOAD_AGE_BEATS: Final = 2
"""A heartbeat goes out at least once in so many of its periods, whatever else was sent."""


@frozen
class BeatDue:
    """Ask the owner for the payload, then call ``beat``."""


BEAT_DUE: Final = BeatDue()


class Session:
    """One established session, seen from one side."""

    __slots__ = (
        "_ack_at",
        "_ack_owed",
        "_backlog",
        "_backlog_bytes",
        "_beat_at",
        "_beat_every_s",
        "_control_at",
        "_gap_told",
        "_heard_at",
        "_open",
        "_open_bytes",
        "_repaired",
        "_retransmit_at",
        "_retransmit_s",
        "_sent",
        "_settings",
        "_taken",
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
        self._beat_at = now  # when a heartbeat last did: only these carry the owner's payload
        self._heard_at = now
        self._sent = 0  # seq of the newest message that was sent
        self._open: deque[bytes] = deque()  # heads of _sent - len + 1 .. _sent
        self._open_bytes = 0
        self._backlog: deque[tuple[Any, ...]] = deque()
        self._backlog_bytes = 0
        self._taken = 0  # seq of the newest message taken in order
        self._ack_owed = 0
        self._ack_at = math.inf
        self._gap_told = 0
        self._repaired = 0
        self._retransmit_s = settings.retransmit_after_s
        self._retransmit_at = math.inf

    def adopt(self, settings: TransportSettings) -> None:
        """Go on with other settings; the owner looks at ``next_deadline`` again afterwards."""
        self._settings = settings
        if self._beat_every_s < math.inf:
            self._beat_every_s = settings.heartbeat_every_s

    def send(self, op: int, fields: tuple[Any, ...], now: float) -> None:
        """Send one control message reliably. ``LocalError`` when it cannot be packed."""
        if len(self._open) >= self._settings.control_window or self._backlog:
            # Packed twice, which is rare, so that its size is known and its errors come now.
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
            (frames.BEAT, self.identity, self._taken, asks, payload), BEAT_LIMIT_BYTES
        )
        self._acked_now(now)
        self._beat_at = now
        self.outbox.append(head)

    def bye_head(self, reason: str) -> bytes:
        """The bytes that end this session."""
        return frames.pack((frames.BYE, self.identity, frames.short(reason)), 8 * frames.TEXT_LIMIT)

    def on_received(self, now: float) -> None:
        """Something of this session arrived, on whatever lane."""
        self._heard_at = now

    def last_received_ago_s(self, now: float) -> float:
        """Seconds since the peer was heard."""
        return now - self._heard_at

    def handle(self, message: Data | Beat | Ack, now: float) -> list[Data | Beat | Any]:
        """One message of this session; returns it when it goes up to the owner."""
        self._heard_at = now
        open_now = len(self._open)
        if open_now or message.ack > self._sent:
            self._acknowledge(message.ack, now)
        if type(message) is Ack:
            if message.gap and self._open:
                self._repair(now)
            return []
        if type(message) is Data and not self._is_next(message.seq, now):
            return []
        return [message]

    def next_deadline(self) -> float:
        """When to call ``handle_timer``. May lie earlier than needed, never later."""
        if self.is_expired:
            return -math.inf
        return min(
            self._heard_at + self._settings.expire_after_s,
            self._beat_due_at(),
            self._ack_at,
            self._retransmit_at,
        )

    def handle_timer(self, now: float) -> list[Any]:
        """Do what is due; look at ``is_expired`` afterwards."""
        if self.is_expired or now >= self._heard_at + self._settings.expire_after_s:
            self.is_expired = True
            return []
        if now >= self._retransmit_at:
            self._retransmit_s = min(2 * self._retransmit_s, self._settings.expire_after_s)
            self._retransmit(now)
        if now >= self._beat_due_at():
            return [BEAT_DUE]  # carries the acknowledgement, if one is owed
        if now >= self._ack_at:
            self._ack(now, gap=False)
        return []

    def _beat_due_at(self) -> float:
        """After a quiet time; and now and then also where much is said, or its payload would grow old."""
        every_s = self._beat_every_s
        return min(self._control_at + every_s, self._beat_at + PAYLOAD_AGE_BEATS * every_s)

    def _is_next(self, seq: int, now: float) -> bool:
        """Count a DATA and see to its acknowledgement."""
        if seq == self._taken + 1:
            self._taken = seq
            self._ack_owed += 1
            if self._ack_owed >= ACK_EVERY:
                self._ack(now, gap=False)
            elif self._ack_at == math.inf:
                self._ack_at = now + self._settings.ack_after_s
            return True
        if seq <= self._taken:
            self._ack(now, gap=False)
        elif self._gap_told != self._taken + 1:
            self._gap_told = self._taken + 1
            self._ack(now, gap=True)
        return False

    def _repair(self, now: float) -> None:
        """The peer misses the first open message: send again, once for each first one."""
        first = self._sent - len(self._open) + 1
        if self._repaired != first:
            self._repaired = first
            self._retransmit(now)

    def _pack(self, op: int, fields: tuple[Any, ...], seq: int) -> bytes:
        return frames.pack(
            (frames.DATA, self.identity, seq, self._taken, op, *fields),
            self._settings.control_limit_bytes,
        )

    def _send_now(self, op: int, fields: tuple[Any, ...], now: float) -> None:
        head = self._pack(op, fields, self._sent + 1)
        self._sent += 1
        self._open.append(head)
        self._open_bytes += len(head)
        if self._retransmit_at == math.inf:
            self._arm(now)
        self._acked_now(now)
        self.outbox.append(head)

    def _acked_now(self, now: float) -> None:
        self._control_at = now
        self._ack_owed = 0
        self._ack_at = math.inf

    def _ack(self, now: float, *, gap: bool) -> None:
        self._acked_now(now)
        self.outbox.append(
            frames.pack((frames.ACK, self.identity, self._taken, gap), frames.TEXT_LIMIT)
        )

    def _acknowledge(self, ack: int, now: float) -> None:
        if ack > self._sent:
            raise PeerError(f"acknowledged message {ack}, only {self._sent} were sent")
        open_heads = self._open
        gone = ack - (self._sent - len(open_heads))
        if gone <= 0:
            return
        for _ in range(gone):
            self._open_bytes -= len(open_heads.popleft())
        self._retransmit_s = self._settings.retransmit_after_s
        while self._backlog and len(open_heads) < self._settings.control_window:
            size, op, fields = self._backlog.popleft()
            self._backlog_bytes -= size
            self._send_now(op, fields, now)
        if open_heads:
            self._arm(now)
        else:
            self._retransmit_at = math.inf

    def _arm(self, now: float) -> None:
        slow_s = self._open_bytes / self._settings.slow_link_bytes_per_s
        self._retransmit_at = now + self._retransmit_s + slow_s

    def _retransmit(self, now: float) -> None:
        self.retransmitted += len(self._open)
        self.outbox.extend(self._open)
        self._control_at = now
        self._arm(now)

"""What the streams of one session need from their endpoint, and what they tell of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import frozen

from fsl_transport.bulk.receive_budget import ReceiveBudget
from fsl_transport.events import TransportEvent
from fsl_transport.link import Buffer
from fsl_transport.settings import TransportSettings


@frozen
class Transfer:
    """How far one stream is, for a status page. ``done`` counts chunks written by the receiver."""

    peer: str
    stream_id: str
    sending: bool
    accepted: bool
    chunks: int
    done: int


class StreamContext(Protocol):
    """What the streams of one session need from the endpoint."""

    settings: TransportSettings
    receive_budget: ReceiveBudget
    """For what is received and not written, over all sessions."""
    early_held_bytes: int
    """Received before they were accepted, over all sessions."""

    def now(self) -> float: ...  # noqa: D102
    def emit(self, event: TransportEvent) -> None: ...  # noqa: D102
    def send_op(self, peer: Any, op: int, fields: tuple[Any, ...]) -> None: ...  # noqa: D102
    def send_bulk(self, peer: Any, stripe: int, frames: Sequence[Buffer]) -> None: ...  # noqa: D102
    def send_head(self, peer: Any, head: bytes) -> None: ...  # noqa: D102
    def open_stripes(self, peer: Any, count: int) -> bool: ...  # noqa: D102
    def rearm(self, peer: Any, now: float) -> None: ...  # noqa: D102


def find(streams: dict[int, Any], stream_id: str) -> Any:
    """The stream of this id, or None."""
    for stream in streams.values():
        if stream.stream_id == stream_id:
            return stream
    return None

"""Messages: what client and parameter server say to each other on the control lane, and the notes on their streams.

A message is a frozen value; on the wire it is a flat map of plain msgpack types with its name under "m". Reading one
checks every field's type and size, because the bytes come from strangers: anything else raises `MessageError`, which
costs the peer its session and never this node its life. docs/WIRE.md lists the fields.

Large things (weights, deltas) travel as streams; the `meta` of a stream offer is one of the last three messages here.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import attrs
from attrs import frozen

MAX_TEXT = 4096
MAX_TENSORS = 200_000
MAX_METRICS = 64


class MessageError(ValueError):
    """A peer's message is not one of ours, or a field is missing, of the wrong type or too large."""


@frozen
class Message:
    """Base of all messages."""


@frozen
class Attach(Message):
    """Client: my model has this manifest (`Manifest.to_wire()`)."""

    fingerprint: str
    manifest: list[Any]


@frozen
class Fetch(Message):
    """Client: I hold `version` (-1: nothing) with `digest`; stream me what leads to the current version."""

    version: int
    digest: str


@frozen
class Holding(Message):
    """Client: I train on `version`, and `digest` is what I computed over it."""

    version: int
    digest: str


@frozen
class Skip(Message):
    """Client: nothing to send for this round."""

    round: int
    reason: str


@frozen
class Publish(Message):
    """Server: you are the first; offer your initial weights."""


@frozen
class Call(Message):
    """Server: round `round` is open; send your pseudo-gradient. After the `last` one nothing is merged any more."""

    round: int
    last: bool = False


@frozen
class Turn(Message):
    """Server: train round `round` from the version of that number, send the delta at its end, and wait for what comes of it."""

    round: int
    last: bool = False


@frozen
class Accepted(Message):
    """Server: this delta is durable here."""

    key: str


@frozen
class Declined(Message):
    """Server: this delta will never be merged; or, with the code "later", offer it again in a while."""

    key: str
    code: str
    text: str


@frozen
class Announce(Message):
    """Server: the run is at `version`."""

    version: int
    digest: str


@frozen
class Reject(Message):
    """Server: this client cannot take part, and why; its session is of no further use."""

    code: str
    text: str


@frozen
class Stop(Message):
    """Server: the run has ended."""

    reason: str


@frozen
class InitialMeta(Message):
    """Stream of initial weights: fp32 frames of the flat vector, one a chunk."""

    fingerprint: str


@frozen
class DeltaMeta(Message):
    """Stream of a delta: one coded frame a chunk."""

    key: str
    base_digest: str
    tokens: int
    steps: int
    round: int
    metrics: dict[str, Any]


@frozen
class VersionMeta(Message):
    """Stream that leads to `version`: kind "update" (coded outer delta from version - 1) or "full" (fp32 frames)."""

    kind: str
    version: int


class Table:
    """Messages that may come on one connection, by name; reads and writes them."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.types = {kind.__name__: kind for kind in kinds}
        self._plans: dict[type[Message], tuple[tuple[str, Any], ...]] = {
            kind: tuple(
                (name, getattr(hint, "__origin__", hint))
                for name, hint in get_type_hints(kind).items()
                if name in attrs.fields_dict(kind)
            )
            for kind in kinds
        }

    def to_wire(self, message: Message) -> dict[str, Any]:
        """Return the plain map that the transport packs."""
        cls = type(message)
        wire: dict[str, Any] = {"m": cls.__name__}
        for name, _ in self._plans[cls]:
            wire[name] = getattr(message, name)
        return wire

    def from_wire(self, wire: Any) -> Message:
        """Read a message; raises MessageError for anything that is not exactly one."""
        if not isinstance(wire, dict):
            raise MessageError(f"a message is a map, not {type(wire).__name__}")
        name = wire.get("m")
        cls = self.types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise MessageError(f"unknown message {str(name)[:40]!r}")
        plan = self._plans[cls]
        if len(wire) != len(plan) + 1:
            raise MessageError(f"{name} has {len(wire) - 1} fields, expected {len(plan)}")
        return cls(
            **{field: _checked(f"{name}.{field}", wire.get(field), kind) for field, kind in plan}
        )


def _checked(where: str, value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise MessageError(f"{where} is {type(value).__name__}, not {kind.__name__}")
    if kind is str and len(value) > MAX_TEXT:
        raise MessageError(f"{where} is longer than {MAX_TEXT} characters")
    if kind is int and not -1 <= value < 1 << 63:
        raise MessageError(f"{where} is out of range")
    if kind is dict and len(value) > MAX_METRICS:
        raise MessageError(f"{where} has more than {MAX_METRICS} entries")
    if kind is list and len(value) > MAX_TENSORS:
        raise MessageError(f"{where} has more than {MAX_TENSORS} entries")
    return value


TABLE = Table(
    Attach, Fetch, Holding, Skip, Publish, Call, Turn, Accepted, Declined, Announce, Reject, Stop,
    InitialMeta, DeltaMeta, VersionMeta,
)  # fmt: skip
to_wire = TABLE.to_wire
from_wire = TABLE.from_wire

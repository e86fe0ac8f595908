"""Messages: what client and parameter server say to each other on the control lane, and the notes on their streams.

A message is a frozen value; on the wire it is a flat map of plain msgpack types with its name under "m". Reading one
checks every field's type and size, because the bytes come from strangers: anything else raises `MessageError`, which
costs the peer its session and never this node its life. docs/WIRE.md lists the fields.

A `str` field is text for people and is made printable as it is read (`fsl_transport.text`). A field that is compared, such as a key or a
digest, has a type that says its exact form, and a value of another form is refused: no escaped text can pass for an identifier.

Large things (weights, deltas) travel as streams; the `meta` of a stream offer is one of the last three messages here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import attrs
from attrs import frozen

from fsl_async.roles.sync.events import DeltaKey
from fsl_transport.text import peer_text

MAX_TEXT = 4096
MAX_TENSORS = 200_000
MAX_METRICS = 64
MAX_ENTRY_NAME = 256
"""Characters of a key in a map, such as the name of a metric."""
_SHOWN = 80
_PLAIN = (str, int, float, bool, type(None))


class MessageError(ValueError):
    """A peer's message is not one of ours, or a field is missing, of the wrong type, form or size."""


@frozen
class Form:
    """What text must look like that is compared and not only shown. `fits` gives a false value or raises ValueError where it does not."""

    what: str
    fits: Callable[[str], object]

    def check(self, where: str, value: str) -> str:
        """Return the value; raises MessageError when it is of another form."""
        try:
            fits = self.fits(value)
        except ValueError:
            fits = None
        if not fits:
            raise MessageError(f"{where} is not {self.what}: {peer_text(value, _SHOWN)}")
        return value


def optional(form: Form) -> Form:
    """The same form, or no text at all."""
    return Form(f"{form.what}, nor empty", lambda text: not text or form.fits(text))


RUN = Form("the name of a run", re.compile(r"[A-Za-z0-9._-]{1,128}").fullmatch)
DIGEST = Form("a digest", re.compile(r"[0-9a-f]{32}").fullmatch)

Run = Annotated[str, RUN]
OptionalRun = Annotated[str, optional(RUN)]
Digest = Annotated[str, DIGEST]
OptionalDigest = Annotated[str, optional(DIGEST)]
Key = Annotated[str, Form("a delta key", DeltaKey.parse)]
Code = Annotated[str, Form("a code", re.compile(r"[a-z][a-z0-9-]{0,63}").fullmatch)]
VersionKind = Annotated[str, Form("a kind of version", {"update", "full"}.__contains__)]


@frozen
class Message:
    """Base of all messages."""


@frozen
class Attach(Message):
    """Client: my model has this manifest (`Manifest.to_wire()`)."""

    fingerprint: Digest
    manifest: list[Any]


@frozen
class Fetch(Message):
    """Client: I hold `version` (-1: nothing) with `digest`; stream me what leads to the current version."""

    version: int
    digest: OptionalDigest


@frozen
class Holding(Message):
    """Client: I train on `version`, and `digest` is what I computed over it."""

    version: int
    digest: Digest


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

    key: Key


@frozen
class Declined(Message):
    """Server: this delta will never be merged; or, with the code "later", offer it again in a while."""

    key: Key
    code: Code
    text: str


@frozen
class Announce(Message):
    """Server: the run is at `version`."""

    version: int
    digest: Digest


@frozen
class Reject(Message):
    """Server: this client cannot take part, and why; its session is of no further use."""

    code: Code
    text: str


@frozen
class Stop(Message):
    """Server: the run has ended."""

    reason: str


@frozen
class InitialMeta(Message):
    """Stream of initial weights: fp32 frames of the flat vector, one a chunk."""

    fingerprint: Digest


@frozen
class DeltaMeta(Message):
    """Stream of a delta: one coded frame a chunk."""

    key: Key
    base_digest: OptionalDigest
    tokens: int
    steps: int
    round: int
    metrics: dict[str, Any]


@frozen
class VersionMeta(Message):
    """Stream that leads to `version`: kind "update" (coded outer delta from version - 1) or "full" (fp32 frames)."""

    kind: VersionKind
    version: int


class Table:
    """Messages that may come on one connection, by name; reads and writes them."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.types = {kind.__name__: kind for kind in kinds}
        self._plans = {kind: _plan(kind) for kind in kinds}

    def to_wire(self, message: Message) -> dict[str, Any]:
        """Return the plain map that the transport packs."""
        cls = type(message)
        wire: dict[str, Any] = {"m": cls.__name__}
        for name, _, _ in self._plans[cls]:
            wire[name] = getattr(message, name)
        return wire

    def from_wire(self, wire: Any) -> Message:
        """Read a message; raises MessageError for anything that is not exactly one."""
        if not isinstance(wire, dict):
            raise MessageError(f"a message is a map, not {type(wire).__name__}")
        name = wire.get("m")
        cls = self.types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise MessageError(f"unknown message {peer_text(str(name), 40)}")
        plan = self._plans[cls]
        if len(wire) != len(plan) + 1:
            raise MessageError(f"{name} has {len(wire) - 1} fields, expected {len(plan)}")
        return cls(
            **{
                field: _checked(f"{name}.{field}", wire.get(field), kind, form)
                for field, kind, form in plan
            }
        )


def _plan(message: type[Message]) -> tuple[tuple[str, Any, Form | None], ...]:
    """Name, type and form of each field."""
    found = []
    hints = get_type_hints(message, include_extras=True)
    for name in attrs.fields_dict(message):
        hint = hints[name]
        form = next(iter(getattr(hint, "__metadata__", ())), None)
        found.append((name, getattr(hint, "__origin__", hint), form))
    return tuple(found)


def checked_text(where: str, value: Any, form: Form | None = None) -> str:
    """Read text of a peer: what has a form must be of it, anything else is made printable. Raises MessageError."""
    if type(value) is not str:
        raise MessageError(f"{where} is {type(value).__name__}, not str")
    if len(value) > MAX_TEXT:
        raise MessageError(f"{where} is longer than {MAX_TEXT} characters")
    return peer_text(value, MAX_TEXT) if form is None else form.check(where, value)


def checked_map(where: str, value: dict[Any, Any]) -> dict[str, Any]:
    """Read a map of a peer, from texts to numbers, texts, bools or None, all made printable. Raises MessageError."""
    made = {}
    for name, entry in value.items():
        if type(name) is not str or type(entry) not in _PLAIN:
            raise MessageError(f"{where} maps texts to numbers and texts")
        shown = peer_text(entry, MAX_TEXT) if type(entry) is str else entry
        made[peer_text(name, MAX_ENTRY_NAME)] = shown
    return made


def _checked(where: str, value: Any, kind: Any, form: Form | None) -> Any:
    if kind is str:
        return checked_text(where, value, form)
    if type(value) is not kind:
        raise MessageError(f"{where} is {type(value).__name__}, not {kind.__name__}")
    if kind is int and not -1 <= value < 1 << 63:
        raise MessageError(f"{where} is out of range")
    if kind is dict:
        if len(value) > MAX_METRICS:
            raise MessageError(f"{where} has more than {MAX_METRICS} entries")
        return checked_map(where, value)
    if kind is list and len(value) > MAX_TENSORS:
        raise MessageError(f"{where} has more than {MAX_TENSORS} entries")
    return value


TABLE = Table(
    Attach, Fetch, Holding, Skip, Publish, Call, Turn, Accepted, Declined, Announce, Reject, Stop,
    InitialMeta, DeltaMeta, VersionMeta,
)  # fmt: skip
to_wire = TABLE.to_wire
from_wire = TABLE.from_wire

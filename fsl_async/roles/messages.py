"""Reads and writes the messages of a connection, strictly. Pure.

A message is a frozen value; on the wire it is a flat map of plain msgpack types with its tag under "m". Reading one
checks every field's type and size, because a peer may send anything: what is not exactly a message raises `MessageError`,
which costs the peer its session and never this node its life. docs/WIRE.md lists the fields.

A `str` field is text for people and is made printable as it is read (`fsl_transport.text`). A field that is compared, such
as a key or a digest, has a type that gives its exact form, and a value of another form is refused: no escaped text can pass
for an identifier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import attrs
from attrs import frozen

from fsl_async.roles.names import Tagged
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


@frozen
class Message(Tagged, tag="message"):
    """Base of all messages."""


class Table:
    """Messages that may come on one connection, by tag; reads and writes them."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.types = {kind.tag: kind for kind in kinds}
        self._plans = {kind: _plan(kind) for kind in kinds}

    def to_wire(self, message: Message) -> dict[str, Any]:
        """Return the plain map that the transport packs."""
        cls = type(message)
        wire: dict[str, Any] = {"m": cls.tag}
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
            raise MessageError(f"{cls.__name__} has {len(wire) - 1} fields, expected {len(plan)}")
        return cls(
            **{
                field: _checked(f"{cls.__name__}.{field}", wire.get(field), kind, form)
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

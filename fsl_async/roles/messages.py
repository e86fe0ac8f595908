"""Reads and writes the messages of a connection, strictly. Pure.

A message is a frozen value; on the wire it is a map of plain msgpack types with its tag under "m".
Reading checks every field's type and size, because a peer may send anything. Anything that is not
exactly a message raises `MessageError`, which ends the peer's session and never this process.
docs/WIRE.md lists the fields.

A `str` field is text for people and is made printable as it is read (`fsl_transport.text`). A field
that is compared, such as a digest, has a type that gives its exact form, and a value of another
form is refused: no escaped text can pass for an identifier. An identifier with parts, such as a
delta's key, travels as its `text`. A field that is a frozen class travels as a map of its fields. A
field that has its default value is left out.
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
MAX_BYTES = 1 << 16
"""Longest value of a field of bytes."""
MAX_ENTRY_NAME = 256
"""Characters of a key in a map, such as the name of a metric."""
_SHOWN = 80
_Factory: type[Any] = type(attrs.Factory(dict))
_PLAIN = (str, int, float, bool, type(None))


class MessageError(ValueError):
    """A peer broke the protocol, by a message or a stream. The text has the value.

    code: the kind of violation, in lower-case words with hyphens.
    """

    def __init__(self, text: str, code: str = "out-of-range") -> None:
        super().__init__(text)
        self.code = code


@frozen
class Form:
    """The form of text that is compared and not only shown.

    fits: returns a false value or raises ValueError if the text is of another form; for an
    identifier with parts it returns the identifier.
    """

    what: str
    fits: Callable[[str], object]

    def read(self, where: str, value: str) -> object:
        """Return the result of `fits`; raises MessageError when the value is of another form."""
        try:
            found = self.fits(value)
        except ValueError:
            found = None
        if not found:
            text = f"{where} is not {self.what}: {peer_text(value, _SHOWN)}"
            raise MessageError(text, "wrong-form")
        return found

    def check(self, where: str, value: str) -> str:
        """Return the value; raises MessageError when it is of another form."""
        self.read(where, value)
        return value


def optional(form: Form) -> Form:
    """The same form, or no text at all."""
    return Form(f"{form.what}, nor empty", lambda text: not text or form.fits(text))


@frozen
class Message(Tagged, tag="message"):
    """Base of all messages."""


@frozen
class Meta(Message, tag="meta"):
    """Base of the metadata of streams, which come with an offer and never by themselves."""


@frozen
class Greeting(Message, tag="greeting"):
    """Base of the bodies of a handshake, which begin a session: hellos and welcomes."""


class Table:
    """Messages that may come on one connection, by tag; reads and writes them."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.types = {kind.tag: kind for kind in kinds}
        self._fields = {kind: _Fields(kind) for kind in kinds}

    def to_wire(self, message: Message) -> dict[str, Any]:
        """Return the plain map that the transport packs."""
        cls = type(message)
        return {"m": cls.tag, **self._fields[cls].written(message)}

    def from_wire(self, wire: Any) -> Message:
        """Read a message; raises MessageError for anything that is not exactly one."""
        if not isinstance(wire, dict):
            raise MessageError(f"a message is a map, not {type(wire).__name__}", "wrong-type")
        name = wire.get("m")
        cls = self.types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise MessageError(f"unknown message {peer_text(str(name), 40)}", "unknown-message")
        made: Message = self._fields[cls].read(cls.__name__, wire, len(wire) - 1)
        return made


@frozen
class _Field:
    """One field of a class: how it is read and written."""

    name: str
    kind: Any
    form: Form | None
    parts: _Fields | None
    default: Any

    @property
    def is_optional(self) -> bool:
        return self.default is not attrs.NOTHING

    def has_default(self, value: Any) -> bool:
        """Whether a value is the one that a reader takes for a missing field."""
        if isinstance(self.default, _Factory):
            return bool(value == self.default.factory())
        return type(value) is type(self.default) and bool(value == self.default)

    def read(self, where: str, value: Any) -> Any:
        if self.parts is not None:
            if type(value) is not dict:
                raise MessageError(f"{where} is {type(value).__name__}, not a map", "wrong-type")
            return self.parts.read(where, value, len(value))
        if self.form is not None and self.kind is not str:
            return self.form.read(where, _text(where, value))
        return _checked(where, value, self.kind, self.form)

    def written(self, value: Any) -> Any:
        if self.parts is not None:
            return self.parts.written(value)
        return value if self.form is None or self.kind is str else value.text


class _Fields:
    """The fields of a frozen class."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self.fields: list[_Field] = []
        hints = get_type_hints(cls, include_extras=True)
        for name, attribute in attrs.fields_dict(cls).items():
            hint = hints[name]
            form = next(iter(getattr(hint, "__metadata__", ())), None)
            kind = getattr(hint, "__origin__", hint)
            parts = _Fields(kind) if form is None and attrs.has(kind) else None
            self.fields.append(_Field(name, kind, form, parts, attribute.default))

    def read(self, where: str, wire: dict[Any, Any], count: int) -> Any:
        """Make a value from a map of which `count` entries are its fields."""
        found = [one for one in self.fields if one.name in wire]
        lacking = [one.name for one in self.fields if one.name not in wire and not one.is_optional]
        if lacking:
            raise MessageError(f"{where} lacks {', '.join(lacking)}", "missing-field")
        if count != len(found):
            text = f"{where} has {count} fields, of which {len(found)} are known"
            raise MessageError(text, "unknown-field")
        values = {one.name: one.read(f"{where}.{one.name}", wire[one.name]) for one in found}
        try:
            return self._cls(**values)
        except MessageError:
            raise
        except ValueError as error:  # a class that checks its values
            raise MessageError(f"{where}: {error}", "wrong-form") from None

    def written(self, value: Any) -> dict[str, Any]:
        """The map of the fields of a value, without those that have their default."""
        given = ((one, getattr(value, one.name)) for one in self.fields)
        return {one.name: one.written(value) for one, value in given if not one.has_default(value)}


def checked_text(where: str, value: Any, form: Form | None = None) -> str:
    """Read text of a peer: check its form, or make it printable if it has none.

    Raises MessageError.
    """
    text = _text(where, value)
    return peer_text(text, MAX_TEXT) if form is None else form.check(where, text)


def _text(where: str, value: Any) -> str:
    if type(value) is not str:
        raise MessageError(f"{where} is {type(value).__name__}, not str", "wrong-type")
    if len(value) > MAX_TEXT:
        raise MessageError(f"{where} is longer than {MAX_TEXT} characters", "too-long")
    return value


def checked_map(where: str, value: dict[Any, Any]) -> dict[str, Any]:
    """Read a map of a peer, from texts to numbers, texts, bools or None; texts are made printable.

    Raises MessageError.
    """
    made = {}
    for name, entry in value.items():
        if type(name) is not str or type(entry) not in _PLAIN:
            raise MessageError(f"{where} maps texts to numbers and texts", "wrong-type")
        shown = peer_text(entry, MAX_TEXT) if type(entry) is str else entry
        made[peer_text(name, MAX_ENTRY_NAME)] = shown
    return made


def _checked(where: str, value: Any, kind: Any, form: Form | None) -> Any:
    if kind is str:
        return checked_text(where, value, form)
    if type(value) is not kind:
        raise MessageError(f"{where} is {type(value).__name__}, not {kind.__name__}", "wrong-type")
    if kind is bytes and len(value) > MAX_BYTES:
        raise MessageError(f"{where} is longer than {MAX_BYTES} bytes", "too-long")
    if kind is int and not -1 <= value < 1 << 63:
        raise MessageError(f"{where} is out of range")
    if kind is dict:
        if len(value) > MAX_METRICS:
            raise MessageError(f"{where} has more than {MAX_METRICS} entries", "too-long")
        return checked_map(where, value)
    if kind is list and len(value) > MAX_TENSORS:
        raise MessageError(f"{where} has more than {MAX_TENSORS} entries", "too-long")
    return value

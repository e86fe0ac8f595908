"""A line of the journal: how an event or effect becomes JSON text, and how that is read. Pure.

    {"n": 17, "t": 1763722149.3, "now": 812.04, "kind": "event", "type": "call",
     "cause": null, "peer": "", "round": 3, "last": false}
    {"n": 18, "t": 1763722149.3, "now": 812.04, "kind": "effect", "type": "take_snapshot",
     "cause": 17, "sequence": 5}

    n      running number, continued from an earlier process of the same run
    t      wall clock, seconds since 1970
    now    the shell's monotonic clock, seconds; starts anew with each process
    kind   "event", "effect", "fact" (what a machine has decided, of which all else but heartbeats
           is read: `fsl_async.roles.sync.facts`) or "note" (written by the shell, with any fields)
    type   tag of the event, effect or fact (`fsl_async.roles.names.Tagged`), or the note's name; of
           a message of a peer its tag without the version, such as `fetch`
    cause  n of the event that an effect came from, or of the effect that an event ends; null where
           it came from outside

Then the fields of the attrs object; of a message of a peer, the peer and the stream, if there is
one, and the fields of the message. A field with the name of one of the six above gets an
underscore behind it (`kind_`). Values are made small and plain: bytes become {"bytes": length},
containers of more than 64 items {"items": count}, non-finite floats "nan", "inf", "-inf", an attrs
value with a `text` property (a delta key) that text, any other attrs value an object, with its tag
under "type" where it has one. So a line is a few hundred bytes, whatever the size of the model. Not
the events themselves: the journal is read with grep and jq years later, without this version's
classes.

A line is canonical (no spaces, fields in the order of the class, floats by their shortest form). A
character that cannot be printed is a JSON escape in the file, so that `tail -f` of a journal is
safe for a terminal, and in what is read the escape of `fsl_transport.text`.
"""

import json
import math
import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import attrs

from fsl_async.roles.machine import Received
from fsl_transport.text import printable

MAX_ITEMS = 64
MAX_TEXT = 2000

_MAX_DEPTH = 6
_RESERVED = frozenset({"n", "t", "now", "kind", "type", "cause"})
_OF_EVENT = ("peer", "stream", "incarnation")
"""Fields of a message's event that its line has."""
_MAY_ESCAPE = re.compile(rb"[\\\x7f-\xff]")
"""In a line of JSON, bytes of characters that may not be printable: most lines have none."""

encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False
).encode
_escape = json.JSONEncoder(ensure_ascii=True).encode


@cache
def _keys_of(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the names of the fields of a class, each with the key of its value in a line."""
    return tuple((one.name, _key_of(one.name)) for one in attrs.fields(kind))


def _key_of(name: str) -> str:
    return f"{name}_" if name in _RESERVED else name


@cache
def _writer_of(kind: type) -> Callable[[Any, int], Any]:
    by_base = (made for base, made in _BY_BASE if issubclass(kind, base))
    return next(by_base, _plain_object if attrs.has(kind) else _plain_unknown)


def plain(value: Any, depth: int = 0) -> Any:
    """A small JSON value of anything, by the rules in the module's docstring."""
    kind: type = type(value)
    return value if kind in _AS_IT_IS else _writer_of(kind)(value, depth)


def _plain_float(value: float, _: int) -> Any:
    return float(value) if math.isfinite(value) else str(float(value))


def _plain_text(value: Any, _: int) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


def _plain_dict(value: dict[Any, Any], depth: int) -> Any:
    if depth >= _MAX_DEPTH or len(value) > MAX_ITEMS:
        return {"items": len(value)}
    return {_plain_key(key): plain(item, depth + 1) for key, item in value.items()}


def _plain_key(key: Any) -> str:
    if type(key) is str and len(key) <= MAX_TEXT:
        return key
    made = plain(key, _MAX_DEPTH - 1)
    return made if isinstance(made, str) else encode(made)


def _plain_items(value: Any, depth: int) -> Any:
    if depth >= _MAX_DEPTH or len(value) > MAX_ITEMS:
        return {"items": len(value)}
    return [plain(item, depth + 1) for item in value]


def _plain_set(value: Any, depth: int) -> Any:
    # A set's order changes from process to process (hashes of strings are seeded), so it is sorted.
    made = _plain_items(value, depth)
    return sorted(made, key=encode) if isinstance(made, list) else made


def _plain_object(value: Any, depth: int) -> Any:
    kind: type = type(value)
    if isinstance(getattr(kind, "text", None), property):
        return _plain_text(value.text, depth)
    made: dict[str, Any] = {"type": kind.tag} if hasattr(kind, "tag") else {}
    return made | (as_fields(value, depth + 1) if depth < _MAX_DEPTH else {})


def _plain_unknown(value: Any, _: int) -> str:
    return f"<{type(value).__name__}>"


_AS_IT_IS = frozenset({int, bool, type(None)})
_BY_BASE: tuple[tuple[type | tuple[type, ...], Callable[[Any, int], Any]], ...] = (
    (Enum, lambda value, _: value.name),
    (Integral, lambda value, _: int(value)),
    (Real, _plain_float),  # NumPy's scalars are registered as these
    ((str, Path), _plain_text),
    ((bytes, bytearray), lambda value, _: {"bytes": len(value)}),
    (memoryview, lambda value, _: {"bytes": value.nbytes}),
    (dict, _plain_dict),
    ((list, tuple), _plain_items),
    ((set, frozenset), _plain_set),
)


def type_of(item: Any) -> str:
    """The type of the line of an event, effect or fact."""
    kind = type(item.message) if isinstance(item, Received) else type(item)
    return str(getattr(kind, "tag", kind.__name__)).partition("/")[0]


def as_fields(item: Any, depth: int = 0) -> dict[str, Any]:
    """The fields of an event or effect behind the first six, as a reader of the file gets them."""
    if isinstance(item, Received):
        own = {name: getattr(item, name) for name in _OF_EVENT if hasattr(item, name)}
        return own | as_fields(item.message, depth)
    kind: type = type(item)
    return {key: plain(getattr(item, name), depth) for name, key in _keys_of(kind)}


def fact_fields(item: Any) -> dict[str, Any]:
    """The fields of a fact, which are plain: of all clients, however many there are."""
    return {name: _finite(value) for name, value in attrs.asdict(item).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return _plain_float(value, 0) if isinstance(value, float) else value


def body_of(item: Any) -> tuple[str, str]:
    """Tag and the JSON text of the fields with a comma before it, ready to stand in a line."""
    return type_of(item), _behind_others(as_fields(item))


def note_body(fields: dict[str, Any]) -> str:
    """The JSON text of a note's fields, likewise."""
    return _behind_others({_key_of(name): plain(value) for name, value in fields.items()})


def _behind_others(fields: dict[str, Any]) -> str:
    return "," + encode(fields)[1:-1] if fields else ""


def line_of(head: str, kind: str, name: str, cause: int | None, body: str) -> str:
    """The whole line. head: the JSON text of the fields before `kind`."""
    by = "null" if cause is None else cause
    return f'{{{head},"kind":"{kind}","type":"{name}","cause":{by}{_written(body)}}}\n'


def _written(json_text: str) -> str:
    """The same JSON with escapes for characters that cannot be printed."""
    if json_text.isprintable():
        return json_text
    return "".join(one if one.isprintable() else _escape(one)[1:-1] for one in json_text)


def read_line(line: bytes) -> dict[str, Any] | None:
    """The object of one line, its text made printable; None where there is none.

    Any program that can write the file chooses that text.
    """
    try:
        found = json.loads(line)
        if _MAY_ESCAPE.search(line) is not None:
            found = _printable(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value

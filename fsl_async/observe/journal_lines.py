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
from collections.abc import Callable, Iterable
from enum import Enum
from numbers import Integral, Real
from operator import attrgetter
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


class _Plan:
    """How objects of one class are written: their keys, and one call that gets all values."""

    __slots__ = ("get", "keys", "name")

    def __init__(self, cls: type) -> None:
        names = [field.name for field in attrs.fields(cls)]
        self.name: str = getattr(cls, "tag", cls.__name__)
        self.keys = tuple(f"{name}_" if name in _RESERVED else name for name in names)
        self.get: Callable[[Any], tuple[Any, ...]]
        if len(names) == 1:
            only = attrgetter(names[0])
            self.get = lambda item: (only(item),)
        else:
            self.get = attrgetter(*names) if names else lambda _: ()


_plans: dict[type, _Plan] = {}


def _plan(cls: type) -> _Plan:
    found = _plans.get(cls)
    if found is None:
        found = _plans[cls] = _Plan(cls)
    return found


def plain(value: Any, depth: int = 0) -> Any:
    """A small JSON value of anything, by the rules in the module's docstring."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    writer = _writers.get(kind)
    if writer is None:
        writer = _writers[kind] = next(
            (made for base, made in _BY_BASE if issubclass(kind, base)),
            _plain_object if attrs.has(kind) else _plain_unknown,
        )
    return writer(value, depth)


def _plain_float(value: float, _: int) -> Any:
    return float(value) if math.isfinite(value) else str(float(value))


def _plain_text(value: Any, _: int) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


def _plain_pairs(pairs: Iterable[tuple[str, Any]], depth: int) -> dict[str, Any]:
    made = {}
    for key, value in pairs:
        # Most values are numbers and short texts, which need no call.
        kind = type(value)
        if (
            kind in _AS_IT_IS
            or (kind is str and len(value) <= MAX_TEXT)
            or (kind is float and value - value == 0.0)
        ):
            made[key] = value
        else:
            made[key] = plain(value, depth)
    return made


def _plain_dict(value: dict[Any, Any], depth: int) -> Any:
    if depth >= _MAX_DEPTH or len(value) > MAX_ITEMS:
        return {"items": len(value)}
    return _plain_pairs(((_plain_key(key), item) for key, item in value.items()), depth + 1)


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
    kind = type(value)
    if isinstance(getattr(kind, "text", None), property):
        return _plain_text(value.text, depth)
    plan = _plan(kind)
    made: dict[str, Any] = {"type": plan.name} if hasattr(kind, "tag") else {}
    if depth < _MAX_DEPTH:
        made |= _plain_pairs(zip(plan.keys, plan.get(value), strict=True), depth + 1)
    return made


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
_writers: dict[type, Callable[[Any, int], Any]] = {}


def type_of(item: Any) -> str:
    """The type of the line of an event, effect or fact."""
    if isinstance(item, Received):
        return _plan(type(item.message)).name.partition("/")[0]
    return _plan(type(item)).name


def as_fields(item: Any) -> dict[str, Any]:
    """The fields of an event or effect behind the first six, as a reader of the file gets them."""
    if isinstance(item, Received):
        own = {name: getattr(item, name) for name in _OF_EVENT if hasattr(item, name)}
        return own | as_fields(item.message)
    plan = _plan(type(item))
    return _plain_pairs(zip(plan.keys, plan.get(item), strict=True), 0)


def fact_fields(item: Any) -> dict[str, Any]:
    """The fields of a fact, which are plain: of all clients, however many there are."""
    return {name: _finite(value) for name, value in attrs.asdict(item).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return _plain_float(value, 0) if isinstance(value, float) else value


def body_of(item: Any) -> tuple[str, str]:
    """Tag and the JSON text of the fields with a comma before it, ready to stand in a line."""
    fields = as_fields(item)
    return type_of(item), "," + encode(fields)[1:-1] if fields else ""


def note_body(fields: dict[str, Any]) -> str:
    """The JSON text of a note's fields, likewise."""
    if not fields:
        return ""
    pairs = ((f"{key}_" if key in _RESERVED else key, value) for key, value in fields.items())
    return "," + encode(_plain_pairs(pairs, 0))[1:-1]


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

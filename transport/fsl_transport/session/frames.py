"""Messages to bytes and back. Bytes from outside are hostile: they give a message or ``PeerError``.

A message is a list of one or two frames. Frame 0, the head, is one msgpack array
``[kind, ...]``; frame 1 exists for CHUNK only and is the raw payload. Rules:

  * sizes are checked before anything is allocated for the content;
  * no msgpack extension types, map keys are ``str`` only, integers are in 0 .. 2**63-1 where the
    protocol itself counts (bodies may hold any msgpack integer);
  * a head of an unknown kind, with a missing, surplus or mistyped field, is a ``PeerError``;
  * the first four fields of HELLO and all of REFUSE never change between protocol versions, so
    that a mismatch can always be explained: a HELLO of another version parses to ``Foreign``;
  * text for people (codes, texts, reasons) is made printable here (``text.py``); what is compared (a role, a stream
    id) must be printable, or the head is a ``PeerError``.

    kind        fields after the kind
    1 HELLO     version, incarnation, attempt, name, role, body
    2 WELCOME   version, incarnation, attempt, session, epoch, body
    3 REFUSE    version, incarnation, attempt, code, text, known
    4 UNKNOWN   session
    5 BEAT      session, ack, asks, payload
    6 DATA      session, seq, ack, op, the op's fields
    7 ACK       session, ack, gap
    8 BYE       session, reason
    9 CHUNK     session, stream, round, index, offset, size, stripe, number, asks    + frame 1: payload
    10 TAKEN    session, stripe, first, last
    11 PROBE    session, stripe, number

    op          fields                                   sent by
    0 MESSAGE   body                                     both
    1 OFFER     stream, stream_id, chunks, line, meta    the stream's sender
    2 ACCEPT    stream, round, chunk, received, limit    the stream's receiver
    3 DECLINE   stream, reason                           the stream's receiver
    4 CREDIT    stream, limit, written                   the stream's receiver
    5 DONE      stream                                   the stream's receiver
    6 STOP      stream, reason                           the stream's sender
    7 ABORT     stream, reason                           the stream's receiver
    8 BLOCKED   stream, limit, line                      the stream's sender
    9 STRIPES   count                                    the listener
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]  # ships no stubs
from attrs import frozen

from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import Body
from fsl_transport.link import NAME, Buffer
from fsl_transport.text import peer_text

PROTOCOL_VERSION: Final = 5
SESSION_BYTES: Final = 8
TEXT_LIMIT: Final = 1024
"""Characters of a reason, a code, a role or a stream id."""
ITEMS_LIMIT: Final = 1 << 17
"""Entries of one array or map; without it a small message could ask for a huge list."""
NATURAL_MAX: Final = (1 << 63) - 1
INCARNATION_LIMIT: Final = 1 << 62
"""Incarnations are below it: as nanoseconds since 1970 they last until 2116, and a listener can always count one more."""

HELLO, WELCOME, REFUSE, UNKNOWN, BEAT, DATA, ACK, BYE, CHUNK, TAKEN, PROBE = range(1, 12)
MESSAGE, OFFER, ACCEPT, DECLINE, CREDIT, DONE, STOP, ABORT, BLOCKED, STRIPES = range(10)


@frozen
class Hello:
    """A dialer asks for a session."""

    version: int
    incarnation: int
    attempt: int
    name: str
    role: str
    body: Body


@frozen
class Foreign:
    """A HELLO of another protocol version: only the part that never changes."""

    version: int
    incarnation: int
    attempt: int


@frozen
class Welcome:
    """The listener's yes; ``epoch`` is the listener's own incarnation."""

    version: int
    incarnation: int
    attempt: int
    session: bytes
    epoch: int
    body: Body


@frozen
class Refuse:
    """The listener's no; ``known`` is the incarnation it holds for the name, or 0."""

    version: int
    incarnation: int
    attempt: int
    code: str
    text: str
    known: int


@frozen
class Unknown:
    """The listener holds no such session: say HELLO again."""

    session: bytes


@frozen
class Beat:
    """Alive; ``asks`` wants a beat in return."""

    session: bytes
    ack: int
    asks: bool
    payload: Body


@frozen
class Data:
    """One reliable control message."""

    session: bytes
    seq: int
    ack: int
    op: int
    fields: list[Any]


@frozen
class Ack:
    """A lone acknowledgement; ``gap`` tells that something after it was missing."""

    session: bytes
    ack: int
    gap: bool


@frozen
class Bye:
    """The session ends on purpose."""

    session: bytes
    reason: str


@frozen
class Chunk:
    """A piece of one chunk of a stream: ``payload`` belongs at ``offset`` of its ``size`` bytes.

    It is number ``number`` on ``stripe``, counted from 1; ``asks`` wants to hear at once that it came.
    """

    session: bytes
    stream: int
    round: int
    index: int
    offset: int
    size: int
    stripe: int
    number: int
    asks: bool
    payload: Buffer


@frozen
class Taken:
    """Numbers ``first`` to ``last`` of a stripe came."""

    session: bytes
    stripe: int
    first: int
    last: int


@frozen
class Probe:
    """Does this stripe stand? Numbered like a piece, and acknowledged at once."""

    session: bytes
    stripe: int
    number: int


Message: TypeAlias = (
    Hello | Foreign | Welcome | Refuse | Unknown | Beat | Data | Ack | Bye | Chunk | Taken | Probe
)

# Kind -> (class, exact types of the fields after the kind, which of them count from zero).
_SHAPES: Final[dict[int, tuple[Any, tuple[type, ...], tuple[int, ...]]]] = {
    HELLO: (Hello, (int, int, int, str, str, dict), (0, 1, 2)),
    WELCOME: (Welcome, (int, int, int, bytes, int, dict), (0, 1, 2, 4)),
    REFUSE: (Refuse, (int, int, int, str, str, int), (0, 1, 2, 5)),
    UNKNOWN: (Unknown, (bytes,), ()),
    BEAT: (Beat, (bytes, int, bool, dict), (1,)),
    ACK: (Ack, (bytes, int, bool), (1,)),
    BYE: (Bye, (bytes, str), ()),
    TAKEN: (Taken, (bytes, int, int, int), (1, 2, 3)),
    PROBE: (Probe, (bytes, int, int), (1, 2)),
}
_OPS: Final[dict[int, tuple[tuple[type, ...], tuple[int, ...]]]] = {
    MESSAGE: ((dict,), ()),
    OFFER: ((int, str, int, int, dict), (0, 2, 3)),
    ACCEPT: ((int, int, int, int, int), (0, 1, 2, 3, 4)),
    DECLINE: ((int, str), (0,)),
    CREDIT: ((int, int, int), (0, 1, 2)),
    DONE: ((int,), (0,)),
    STOP: ((int, str), (0,)),
    ABORT: ((int, str), (0,)),
    BLOCKED: ((int, int, int), (0, 1, 2)),
    STRIPES: ((int,), (0,)),
}
_CHUNK_TYPES: Final = (bytes, int, int, int, int, int, int, int, bool)
_CHUNK_NATURALS: Final = (1, 2, 3, 4, 5, 6, 7)
_NAMES: Final = {
    HELLO: "HELLO",
    WELCOME: "WELCOME",
    REFUSE: "REFUSE",
    UNKNOWN: "UNKNOWN",
    BEAT: "BEAT",
    ACK: "ACK",
    BYE: "BYE",
    TAKEN: "TAKEN",
    PROBE: "PROBE",
}
_PLAIN: Final = frozenset((str, int, float, bool, bytes, type(None)))

# One packer for all: making one per message costs more than the packing.
_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def _no_extension(code: int, _data: bytes) -> object:
    raise PeerError(f"msgpack extension type {code} in a head")


def parse(frames: Sequence[Buffer], head_limit: int, chunk_limit: int) -> Message:
    """Read one message; ``PeerError`` for everything that is not one, and never another error."""
    count = len(frames)
    if count == 0 or count > 2:
        raise PeerError(f"a message has one or two frames, not {count}")
    fields = _unpack(frames[0], head_limit)
    kind = fields[0]
    if kind == DATA:
        message: Message = _data(fields)
    elif kind == CHUNK:
        if count != 2:
            raise PeerError("CHUNK without a payload")
        return _chunk(fields, frames[1], chunk_limit)
    else:
        message = _plain(kind, fields)
    if count == 2:
        raise PeerError(f"kind {kind} with a payload")
    return message


def _unpack(head: Buffer, head_limit: int) -> list[Any]:
    if len(head) > head_limit:
        raise PeerError(f"a head of {len(head)} bytes is over the limit of {head_limit}")
    # Room for an array is made before it is read; each of its items takes a byte at least.
    items_limit = min(ITEMS_LIMIT, len(head))
    try:
        fields = msgpack.unpackb(
            head,
            ext_hook=_no_extension,
            max_ext_len=0,
            max_array_len=items_limit,
            max_map_len=items_limit,
        )
    except PeerError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # Of text that is not UTF-8 the error has the whole head in it.
        raise PeerError(f"a head that is no msgpack: {peer_text(str(error), 120)}") from error
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        raise PeerError("a head that is no array with a kind")
    return fields


def _check(
    name: str, fields: list[Any], types: tuple[type, ...], naturals: tuple[int, ...]
) -> None:
    """Types, ranges, map keys; a reason, which is always the last field, is made printable."""
    if tuple(map(type, fields)) != types:
        raise PeerError(f"{name} with wrong fields")
    for position in naturals:
        if not 0 <= fields[position] <= NATURAL_MAX:
            raise PeerError(f"{name} with a number out of range")
    last = fields[-1]
    if type(last) is dict:
        if last and not has_str_keys(last):
            raise PeerError("a map key that is no str")
    elif type(last) is str:
        if len(last) > TEXT_LIMIT:
            raise PeerError("a reason that is too long")
        fields[-1] = short(last)


def _check_session(session: object) -> None:
    if type(session) is not bytes or len(session) != SESSION_BYTES:
        raise PeerError("a session id of the wrong type or length")


def _plain(kind: int, fields: list[Any]) -> Message:
    shape = _SHAPES.get(kind)
    if shape is None:
        raise PeerError(f"unknown kind {kind}")
    if kind == HELLO and len(fields) >= 4 and fields[1] != PROTOCOL_VERSION:
        fields = fields[:4]
        shape = (Foreign, (int, int, int), (0, 1, 2))
    cls, types, naturals = shape
    del fields[0]
    _check(_NAMES[kind], fields, types, naturals)
    if kind > REFUSE:
        _check_session(fields[0])
    elif cls is Hello:
        if NAME.fullmatch(fields[3]) is None or not _is_identifier(fields[4]):
            raise PeerError("HELLO with a bad name or role")
        if fields[1] >= INCARNATION_LIMIT:
            raise PeerError("HELLO with an incarnation out of range")
    elif cls is Welcome:
        _check_session(fields[3])
    elif cls is Refuse:
        if len(fields[3]) > TEXT_LIMIT or len(fields[4]) > TEXT_LIMIT:
            raise PeerError("REFUSE with too long a text")
        fields[3:5] = map(short, fields[3:5])
    message: Message = cls(*fields)
    return message


def _chunk(fields: list[Any], payload: Buffer, chunk_limit: int) -> Chunk:
    del fields[0]
    _check("CHUNK", fields, _CHUNK_TYPES, _CHUNK_NATURALS)
    _check_session(fields[0])
    offset, size = fields[4], fields[5]
    length = len(payload)
    if size > chunk_limit:
        raise PeerError(f"a chunk of {size} bytes is over the limit of {chunk_limit}")
    if offset + length > size or (length == 0 and size):
        raise PeerError(f"{length} bytes at {offset} of a chunk of {size}")
    session, stream, round_, index, _, _, stripe, number, asks = fields
    return Chunk(session, stream, round_, index, offset, size, stripe, number, asks, payload)


def _is_identifier(text: str) -> bool:
    """Whether a role or a stream id is one: it is compared, so it is refused and not escaped."""
    return len(text) <= TEXT_LIMIT and text.isprintable()


def _data(fields: list[Any]) -> Data:
    if len(fields) < 5:
        raise PeerError("DATA with wrong fields")
    _, session, seq, ack, op = fields[:5]
    _check_session(session)
    if type(seq) is not int or type(ack) is not int or type(op) is not int:
        raise PeerError("DATA with wrong fields")
    if not (0 <= seq <= NATURAL_MAX and 0 <= ack <= NATURAL_MAX):
        raise PeerError("DATA with a number out of range")
    shape = _OPS.get(op)
    if shape is None:
        raise PeerError(f"DATA with unknown op {op}")
    del fields[:5]
    _check(f"DATA op {op}", fields, *shape)
    if op == OFFER and not (fields[1] and _is_identifier(fields[1])):
        raise PeerError("a stream id that is empty, too long or not printable")
    return Data(session, seq, ack, op, fields)


def has_str_keys(body: Body) -> bool:
    """Whether every map in ``body``, at every depth, has only ``str`` keys."""
    open_values: list[Any] = [body]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if type(key) is not str:
                    return False
                if type(inner) not in _PLAIN:
                    open_values.append(inner)
        elif isinstance(value, list | tuple):
            open_values.extend([inner for inner in value if type(inner) not in _PLAIN])
    return True


def check_body(body: Body) -> Body:
    """Return ``body`` or raise ``LocalError`` when a peer would refuse its shape."""
    if not isinstance(body, dict):
        raise LocalError(f"a body is a dict, not {type(body).__name__}")
    if not has_str_keys(body):
        raise LocalError("every map key of a body must be a str, at every depth")
    return body


def pack(fields: Sequence[object], limit: int) -> bytes:
    """One head. ``LocalError`` when msgpack cannot hold it or it is larger than ``limit``."""
    try:
        head: bytes = _pack(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalError(f"this cannot travel as msgpack: {error}") from error
    if len(head) > limit:
        raise LocalError(
            f"a control message of {len(head)} bytes is over the limit of {limit}:"
            " send it as a stream"
        )
    return head


def short(text: str) -> str:
    """``text`` made printable and cut to what a reason may hold."""
    return peer_text(text, TEXT_LIMIT)

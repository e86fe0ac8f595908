"""Wire format of the transport: messages to bytes and back.

Bytes from outside may be hostile: parsing gives a message or raises ``PeerError``.

A message is one or two frames. Frame 0, the head, is a msgpack array ``[kind, ...]``. Frame 1, the
raw payload, exists for CHUNK only. Rules
  * Sizes are checked before anything is allocated for the content.
  * There are no msgpack extension types. Map keys are ``str``. Integers that the protocol counts
    are in 0 .. 2**63-1; bodies may hold any msgpack integer.
  * A head of an unknown kind, or with a missing, surplus or mistyped field, is a ``PeerError``.
  * The first four fields of HELLO and all of REFUSE never change between protocol versions, so that
    a mismatch can be explained: a HELLO of another version parses to ``Foreign``.
  * Free text (codes, texts, reasons) is made printable here (``text.py``). Text that is
    compared (a role, a stream id) must be printable, or the head is a ``PeerError``.

    kind         fields after the kind
     1 HELLO     version, incarnation, attempt, name, role, body
     2 WELCOME   version, incarnation, attempt, session, epoch, body
     3 REFUSE    version, incarnation, attempt, code, text, known
     4 UNKNOWN   session
     5 BEAT      session, ack, asks, payload
     6 DATA      session, seq, ack, op, the op's fields
     7 ACK       session, ack, gap
     8 BYE       session, reason
     9 CHUNK     session, stream, round, index, offset, size, stripe, number, asks    + payload
    10 PIECE_ACK session, stripe, first, last
    11 PROBE     session, stripe, number

    op          fields                                   sent by
    0 MESSAGE   body                                     both
    1 OFFER     stream, stream_id, chunks, target, meta  the stream's sender
    2 ACCEPT    stream, round, chunk, received, limit    the stream's receiver
    3 DECLINE   stream, reason                           the stream's receiver
    4 CREDIT    stream, limit, written                   the stream's receiver
    5 DONE      stream                                   the stream's receiver
    6 STOP      stream, reason                           the stream's sender
    7 ABORT     stream, reason                           the stream's receiver
    8 BLOCKED   stream, limit, target                    the stream's sender
    9 STRIPES   count                                    the listener

``target`` is the number of bytes that the sender's path needs in flight, as measured so far.

Trailer. Over ZeroMQ a payload is followed by its head once more, ``0xC1 + head``. CURVE
authenticates each frame and proves that it is newer than the one before, but not that none is
missing: nonces grow, and libzmq accepts gaps (RFC 26). Without the trailer, a relay without any key
could drop the payload of one chunk and the head of the next, and join two genuine frames that do
not belong together. Two chunks of a session never share a head (stream, round, index), and frames
keep their order, so only the right payload can stand between a head and its trailer. A message that
does not fit is dropped like a lost one. No msgpack value begins with 0xC1, so a trailer on its own
is recognized too.
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

PROTOCOL_VERSION: Final = 9
SESSION_BYTES: Final = 8
TEXT_LIMIT: Final = 1024
"""Maximum number of characters of a reason, a code, a role or a stream id."""
ITEMS_LIMIT: Final = 1 << 17
"""Maximum number of entries of one array or map, so that no small message allocates a huge list."""
NATURAL_MAX: Final = (1 << 63) - 1
INCARNATION_LIMIT: Final = 1 << 62
"""Incarnations are below it: nanoseconds since 1970 until 2116, with room to count one more."""
SUPERSEDED: Final = "superseded"
"""Code of a REFUSE: the listener holds a higher incarnation of the name."""
REVOKED: Final = "revoked"
"""Reason of a BYE to a peer whose key is no longer allowed: it should not come back."""
_TRAILER_MARK: Final = b"\xc1"

HELLO, WELCOME, REFUSE, UNKNOWN, BEAT, DATA, ACK, BYE, CHUNK, PIECE_ACK, PROBE = range(1, 12)
MESSAGE, OFFER, ACCEPT, DECLINE, CREDIT, DONE, STOP, ABORT, BLOCKED, STRIPES = range(10)


@frozen
class Hello:
    """A dialer requests a session."""

    version: int
    incarnation: int
    attempt: int
    name: str
    role: str
    body: Body


@frozen
class Foreign:
    """A HELLO of another protocol version: only the fields that never change."""

    version: int
    incarnation: int
    attempt: int


@frozen
class Welcome:
    """The listener grants the session; ``epoch`` is the listener's own incarnation."""

    version: int
    incarnation: int
    attempt: int
    session: bytes
    epoch: int
    body: Body


@frozen
class Refuse:
    """The listener refuses; ``known`` is the incarnation it holds for the name, or 0."""

    version: int
    incarnation: int
    attempt: int
    code: str
    text: str
    known: int


@frozen
class Unknown:
    """The listener holds no such session; the dialer sends HELLO again."""

    session: bytes


@frozen
class Beat:
    """Heartbeat; ``asks`` requests one in return."""

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
    """A lone acknowledgement; ``gap`` reports that the next message is missing."""

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

    It is number ``number`` on ``stripe``, counted from 1; ``asks`` requests an immediate PIECE_ACK.
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
class PieceAck:
    """The pieces numbered ``first`` to ``last`` of a stripe arrived."""

    session: bytes
    stripe: int
    first: int
    last: int


@frozen
class Probe:
    """Tests whether a stripe works. Numbered like a piece, and acknowledged at once."""

    session: bytes
    stripe: int
    number: int


Message: TypeAlias = (
    Hello
    | Foreign
    | Welcome
    | Refuse
    | Unknown
    | Beat
    | Data
    | Ack
    | Bye
    | Chunk
    | PieceAck
    | Probe
)

# Kind -> (class, exact types of the fields after the kind, positions of natural numbers).
_SHAPES: Final[dict[int, tuple[Any, tuple[type, ...], tuple[int, ...]]]] = {
    HELLO: (Hello, (int, int, int, str, str, dict), (0, 1, 2)),
    WELCOME: (Welcome, (int, int, int, bytes, int, dict), (0, 1, 2, 4)),
    REFUSE: (Refuse, (int, int, int, str, str, int), (0, 1, 2, 5)),
    UNKNOWN: (Unknown, (bytes,), ()),
    BEAT: (Beat, (bytes, int, bool, dict), (1,)),
    ACK: (Ack, (bytes, int, bool), (1,)),
    BYE: (Bye, (bytes, str), ()),
    PIECE_ACK: (PieceAck, (bytes, int, int, int), (1, 2, 3)),
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
    PIECE_ACK: "PIECE_ACK",
    PROBE: "PROBE",
}
_PLAIN: Final = frozenset((str, int, float, bool, bytes, type(None)))

# One packer for all messages: making one costs more than packing a message.
_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def _no_extension(code: int, _data: bytes) -> object:
    raise PeerError(f"msgpack extension type {code} in a head")


def parse(frames: Sequence[Buffer], head_limit: int, chunk_limit: int) -> Message:
    """Parse one message. Raises ``PeerError`` for anything else, and no other exception."""
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
    # msgpack allocates an array before it reads it; each item takes at least one byte.
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
        # For text that is not UTF-8 the error contains the whole head.
        raise PeerError(f"a head that is not msgpack: {peer_text(str(error), 120)}") from error
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        raise PeerError("a head that is not an array with a kind")
    return fields


def _check(
    name: str, fields: list[Any], types: tuple[type, ...], naturals: tuple[int, ...]
) -> None:
    """Check types, ranges and map keys. Make a reason, always the last field, printable."""
    if tuple(map(type, fields)) != types:
        raise PeerError(f"{name} with wrong fields")
    for position in naturals:
        if not 0 <= fields[position] <= NATURAL_MAX:
            raise PeerError(f"{name} with a number out of range")
    last = fields[-1]
    if type(last) is dict:
        if last and not has_str_keys(last):
            raise PeerError("a map key that is not a str")
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
    """Whether a role or a stream id is valid. It is compared, so it is refused, not escaped."""
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
    """Whether all maps in ``body``, at every depth, have only ``str`` keys."""
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
    """Return ``body``, or raise ``LocalError`` if a peer would refuse its shape."""
    if not isinstance(body, dict):
        raise LocalError(f"a body is a dict, not {type(body).__name__}")
    if not has_str_keys(body):
        raise LocalError("every map key of a body must be a str, at every depth")
    return body


def pack(fields: Sequence[object], limit: int) -> bytes:
    """Pack one head. ``LocalError`` if msgpack cannot encode it or it exceeds ``limit`` bytes."""
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
    """Make ``text`` printable and cut it to the length of a reason."""
    return peer_text(text, TEXT_LIMIT)


def unknown_head(session: bytes) -> bytes:
    """Pack UNKNOWN."""
    return pack((UNKNOWN, session), TEXT_LIMIT)


def refusal_head(incarnation: int, attempt: int, code: str, text: str, *, known: int) -> bytes:
    """Pack REFUSE."""
    fields = (REFUSE, PROTOCOL_VERSION, incarnation, attempt, short(code), short(text), known)
    return pack(fields, 16 * TEXT_LIMIT)


def protocol_refusal(message: Foreign) -> bytes:
    """Pack REFUSE for a HELLO of another protocol version."""
    text = (
        f"the listener speaks protocol {PROTOCOL_VERSION}, the dialer {message.version}:"
        " install the same release on both sides"
    )
    return refusal_head(message.incarnation, message.attempt, "protocol", text, known=0)


def trailer(head: bytes | bytearray | memoryview) -> bytes:
    """Return the frame that follows the payload of a message with this head."""
    return _TRAILER_MARK + head


def is_whole(parts: Sequence[bytes | memoryview]) -> bool:
    """Whether the frames are one complete message: a head, or a head, payload and trailer."""
    if len(parts) == 1:
        return parts[0][:1] != _TRAILER_MARK
    return len(parts) == 3 and parts[2] == trailer(parts[0])

"""Encrypted links: key pairs, who is let in, and why a handshake failed. CurveZMQ (RFC 26) by libzmq, ZAP (RFC 27) here.

What libzmq does: it encrypts and authenticates each connection with keys of its own, made for that connection, proves to the
dialer that the listener has the secret key of ``server_key``, and asks the ZAP handler in its own process whether a dialer's
long-term key may come in. What happens here: that handler, and words for what failed.

Rules
  * The handler is bound before the listener's port is, and the listener demands one (ZAP_ENFORCE_DOMAIN): while none answers,
    nobody comes in.
  * The answer is 200 or 400. 300 would make the dialer wait for its handshake to time out without a word (libzmq #2667).
  * The User-Id of a connection is its Z85 key. libzmq puts it on each message, so that a key that is no longer allowed is
    told by every message of a connection that stands (``ZmqListener``): ZAP is asked once in its life only.
  * Whatever comes by ZAP is answered; what is not of that protocol with 400.

What each side sees of a failure (libzmq 4.3.5; tried with each pair of ends)
    cause                       listener                                dialer
    key not allowed             ZAP, then FAILED_AUTH 400               FAILED_AUTH 400; it dials no more
    other server key            FAILED_PROTOCOL cryptographic           closed (FAILED_NO_DETAIL, EPIPE or ECONNRESET); dials again
    only one side encrypts      either: FAILED_PROTOCOL mechanism; the other one: closed
A dialer whose connection failed with FAILED_AUTH or FAILED_PROTOCOL is dead to libzmq: ``ZmqDialer`` dials again by itself.
"""

from __future__ import annotations

import asyncio
import errno
import re
import struct
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeAlias

import zmq
import zmq.asyncio
from attrs import Attribute, field, frozen
from zmq.utils import z85

from fsl_transport.errors import LocalError
from fsl_transport.text import peer_text

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = b"fsl"
_ZAP_VERSION: Final = b"1.0"
_ZAP_FIELDS: Final = 7
_KEY_BYTES: Final = 32
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85 (RFC 32): 32 bytes as 40 characters."""

UNKNOWN_KEY: Final = "unknown-key"
SERVER_KEY: Final = "server-key"
MECHANISM: Final = "mechanism"
CLOSED: Final = "closed"
OTHER: Final = "other"


def is_key(text: str) -> bool:
    """Whether ``text`` is 32 bytes in Z85: its characters, and no group of five beyond 2^32 - 1."""
    if not isinstance(text, str) or _KEY.fullmatch(text) is None:
        return False
    try:
        return any(
            z85.decode(text)
        )  # all zeros is a point of small order: everybody knows its shared secrets
    except struct.error:
        return False


def _check_key(_instance: object, attribute: Attribute[str], value: str) -> None:
    if not is_key(value):
        raise LocalError(f"not a key: {attribute.name} must be 40 characters of Z85")


@frozen
class KeyPair:
    """A long-term Curve25519 pair, both halves as 40 characters of Z85. The secret half is in no ``repr``."""

    public: str = field(validator=_check_key)
    secret: str = field(validator=_check_key, repr=False)

    @classmethod
    def new(cls) -> Self:
        """Make a pair; chance is the operating system's."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: str) -> Self:
        """The pair of a secret half. ``LocalError`` when it is none."""
        if not is_key(secret):
            raise LocalError("not a secret key: 40 characters of Z85 are one")
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


@frozen
class HandshakeFailed:
    """A handshake that failed, as far as this side can know.

    ``why``: ``unknown-key`` (the listener does not let the dialer's key in), ``server-key`` (the dialer wants another listener key; only
    the listener knows), ``mechanism`` (only one side encrypts), ``closed`` (the other side hung up in the middle) or ``other``.
    ``key`` and ``address`` (an IP) are the dialer's, where ZAP told the listener.
    """

    why: str
    key: str = ""
    address: str = ""


Send: TypeAlias = Callable[[HandshakeFailed], None]


def deny_all(_failed: HandshakeFailed) -> None:
    """Whom to tell where nobody wants to know."""


@frozen
class ListenerCurve:
    """A listener's pair, and whom it lets in: ``allows(public key)`` is asked for each handshake and for each message."""

    pair: KeyPair
    allows: Callable[[str], bool]

    def prepare(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
        """Set the options of a socket that is not bound yet."""
        socket.curve_server = 1
        socket.curve_publickey = self.pair.public.encode()
        socket.curve_secretkey = self.pair.secret.encode()
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@frozen
class DialerCurve:
    """A dialer's pair, and the key that the listener must prove to have."""

    pair: KeyPair
    server_key: str = field(validator=_check_key)

    def prepare(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
        """Set the options of a socket that does not dial yet."""
        socket.curve_serverkey = self.server_key.encode()
        socket.curve_publickey = self.pair.public.encode()
        socket.curve_secretkey = self.pair.secret.encode()


def answer_zap(
    request: Sequence[bytes], allows: Callable[[str], bool]
) -> tuple[list[bytes], HandshakeFailed | None]:
    """The reply to one ZAP request, and whom it turned away.

    A request is version, request id, domain, address, routing id, mechanism and, for CURVE, the 32 bytes of the key. All but the
    first three come from a stranger.
    """
    request_id = bytes(request[1]) if len(request) > 1 else b""
    if len(request) != _ZAP_FIELDS or request[0] != _ZAP_VERSION:
        return _reply(request_id, b"400", b"not a ZAP 1.0 request"), None
    address = _address(request[3])
    if request[2] != ZAP_DOMAIN or request[5] != b"CURVE" or len(request[6]) != _KEY_BYTES:
        return _reply(request_id, b"400", b"not CURVE"), HandshakeFailed(MECHANISM, "", address)
    key = z85.encode(bytes(request[6])).decode()
    if not allows(key):
        return _reply(request_id, b"400", b"unknown key"), HandshakeFailed(
            UNKNOWN_KEY, key, address
        )
    return _reply(request_id, b"200", b"OK", key.encode()), None


def _address(told: bytes) -> str:
    return peer_text(bytes(told).decode("ascii", "replace"), 64)


def _reply(request_id: bytes, code: bytes, text: bytes, user: bytes = b"") -> list[bytes]:
    return [_ZAP_VERSION, request_id, code, text, user, b""]


class ZapHandler:
    """The one who answers libzmq's question who may come in; one for a context."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        allows: Callable[[str], bool],
        tell: Send,
        let_in: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self._allows = allows
        self._tell = tell
        self._let_in = let_in
        self._socket: zmq.asyncio.Socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)

    async def run(self) -> None:
        """Answer until the task is cancelled."""
        while True:
            request = await self._socket.recv_multipart()
            answer, failed = answer_zap(request, self._allows)
            await self._socket.send_multipart(answer)
            if answer[2] == b"200":
                self._let_in(_address(request[3]))
            if failed is not None:
                try:
                    self._tell(failed)
                except Exception as error:  # noqa: BLE001 - the owner's bug must not shut the door for everybody
                    context = {"message": "a handler of fsl_transport failed", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close(0)


def listener_failure(event: int, value: int) -> HandshakeFailed | None:
    """What a listener's monitor event says that ZAP has not said."""
    if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return None
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return HandshakeFailed(SERVER_KEY)
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return HandshakeFailed(MECHANISM)
    return None  # scanners, browsers


def dialer_failure(event: int, value: int) -> HandshakeFailed:
    """What a dialer's monitor event says."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return HandshakeFailed(UNKNOWN_KEY)
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        is_mechanism = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        return HandshakeFailed(MECHANISM if is_mechanism else OTHER)
    if value in {errno.EPIPE, errno.ECONNRESET}:
        return HandshakeFailed(CLOSED)
    return HandshakeFailed(OTHER)

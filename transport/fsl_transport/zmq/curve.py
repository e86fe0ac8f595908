"""Encrypted links: keys, access by key, and causes of failed handshakes.

libzmq implements CurveZMQ (RFC 26): it encrypts and authenticates each connection with ephemeral
keys, proves to the dialer that the listener holds the secret key of ``server_key``, and asks the
ZAP handler in its own process whether a dialer's long-term key is allowed. This module implements
that handler (ZAP, RFC 27) and classifies failures.

Rules
  * The handler is bound before the listener's port, and the listener requires one
    (ZAP_ENFORCE_DOMAIN): while no handler answers, no connection is accepted.
  * The answer is 200 or 400. After 300, the dialer would wait silently for its handshake to time
    out (libzmq #2667).
  * The User-Id of a connection is its Z85 key. libzmq attaches it to each message, so
    ``ZmqListener`` can drop messages of a key that is no longer allowed, although ZAP was asked
    only once.
  * Every ZAP request is answered; one that is not of that protocol with 400.

What each side sees of a failure (libzmq 4.3.5; tested with each pair of ends)
    cause                 listener                           dialer
    key not allowed       ZAP, then FAILED_AUTH 400          FAILED_AUTH 400; dials no more
    other server key      FAILED_PROTOCOL cryptographic      closed (FAILED_NO_DETAIL, EPIPE or
                                                             ECONNRESET); dials again
    only one side         one of the two sees FAILED_PROTOCOL mechanism, the other one closed
    encrypts
libzmq gives up a connection that failed with FAILED_AUTH or FAILED_PROTOCOL; ``ZmqDialer`` then
dials again.
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
    """Whether ``text`` encodes 32 bytes in Z85: its characters, and no group above 2^32 - 1."""
    if not isinstance(text, str) or _KEY.fullmatch(text) is None:
        return False
    try:
        # All zeros is a point of small order, whose shared secrets are public.
        return any(z85.decode(text))
    except struct.error:
        return False


def _check_key(_instance: object, attribute: Attribute[str], value: str) -> None:
    if not is_key(value):
        raise LocalError(f"not a key: {attribute.name} must be 40 characters of Z85")


@frozen
class KeyPair:
    """Long-term Curve25519 pair, each key as 40 characters of Z85. ``repr`` omits the secret."""

    public: str = field(validator=_check_key)
    secret: str = field(validator=_check_key, repr=False)

    @classmethod
    def new(cls) -> Self:
        """Generate a pair with the operating system's randomness."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: str) -> Self:
        """Return the pair of a secret key. ``LocalError`` if it is not a key."""
        if not is_key(secret):
            raise LocalError("not a secret key: 40 characters of Z85 are one")
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


@frozen
class HandshakeFailed:
    """A failed handshake, as far as this side can tell.

    ``why`` is one of
      * ``unknown-key``: the listener does not allow the dialer's key;
      * ``server-key``: the dialer expects another listener key (only the listener can tell);
      * ``mechanism``: only one side encrypts;
      * ``closed``: the peer closed the connection during the handshake;
      * ``other``.
    ``key`` and ``address`` (an IP address) are the dialer's, where ZAP told the listener.
    """

    why: str
    key: str = ""
    address: str = ""


OnFailure: TypeAlias = Callable[[HandshakeFailed], None]


def ignore_failure(_failed: HandshakeFailed) -> None:
    """Do nothing about a failed handshake."""


@frozen
class ListenerCurve:
    """A listener's pair and its access control.

    ``allows(public key)`` is called for each handshake and for each message.
    """

    pair: KeyPair
    allows: Callable[[str], bool]

    def prepare(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
        """Set the options of a socket before it is bound."""
        socket.curve_server = 1
        socket.curve_publickey = self.pair.public.encode()
        socket.curve_secretkey = self.pair.secret.encode()
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@frozen
class DialerCurve:
    """A dialer's pair, and the public key whose secret key the listener must prove to hold."""

    pair: KeyPair
    server_key: str = field(validator=_check_key)

    def prepare(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
        """Set the options of a socket before it dials."""
        socket.curve_serverkey = self.server_key.encode()
        socket.curve_publickey = self.pair.public.encode()
        socket.curve_secretkey = self.pair.secret.encode()


def answer_zap(
    request: Sequence[bytes], allows: Callable[[str], bool]
) -> tuple[list[bytes], HandshakeFailed | None]:
    """Return the reply to one ZAP request, and the failure if the key was denied.

    A request is version, request id, domain, address, routing id, mechanism and, for CURVE, the 32
    bytes of the key. All but the first three come from an unauthenticated peer.
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


def _address(raw: bytes) -> str:
    return peer_text(bytes(raw).decode("ascii", "replace"), 64)


def _reply(request_id: bytes, code: bytes, text: bytes, user: bytes = b"") -> list[bytes]:
    return [_ZAP_VERSION, request_id, code, text, user, b""]


class ZapHandler:
    """Answers libzmq's ZAP requests; one per context.

    ``on_accepted`` gets the network address of each key that was accepted.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        allows: Callable[[str], bool],
        on_failure: OnFailure,
        on_accepted: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self._allows = allows
        self._on_failure = on_failure
        self._on_accepted = on_accepted
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
                self._on_accepted(_address(request[3]))
            if failed is not None:
                try:
                    self._on_failure(failed)
                except Exception as error:  # noqa: BLE001 - its bug must not stop the handler
                    context = {"message": "a handler of fsl_transport failed", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close(0)


def listener_failure(event: int, value: int) -> HandshakeFailed | None:
    """Classify a listener's monitor event; None if ZAP reported it, or no dialer caused it."""
    if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return None
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return HandshakeFailed(SERVER_KEY)
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return HandshakeFailed(MECHANISM)
    return None  # scanners, browsers


def dialer_failure(event: int, value: int) -> HandshakeFailed:
    """Classify a dialer's monitor event."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return HandshakeFailed(UNKNOWN_KEY)
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        is_mechanism = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        return HandshakeFailed(MECHANISM if is_mechanism else OTHER)
    if value in {errno.EPIPE, errno.ECONNRESET}:
        return HandshakeFailed(CLOSED)
    return HandshakeFailed(OTHER)

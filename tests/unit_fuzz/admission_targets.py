"""Targets for bytes read before a session: ZMTP greetings, ZAP requests, EC2's metadata service.

The relay's pairs are the real ones, on socket pairs in this process with an event loop for each
input. The ZAP handler is the real one on a recording socket. The metadata watch is the real one,
with its HTTP, on a connection whose answers are the input's.
"""

# ruff: noqa: D102 - small doubles of documented protocols

import asyncio
import contextlib
import http.client
import io
import json
import math
import socket
import urllib.request
from types import SimpleNamespace

import msgpack
from target_parts import Target, steps_of
from zmq.utils import z85

from fsl_async.nodes.relay.pair import Dropped, Pair
from fsl_async.process.watches import SpotWatch
from fsl_transport import TransportSettings
from fsl_transport.relay.buffer import PipePool
from fsl_transport.relay.zmtp_greeting import GREETING_BYTES, SIGNATURE_BYTES
from fsl_transport.session.access_control import ConnectionLimits
from fsl_transport.zmq.curve import UNKNOWN_KEY, ZAP_DOMAIN, KeyPair, ZapHandler, is_key

# --- a relay, until it forwards bytes unread ---


class DialedPair(Pair):
    """A pair whose upstream is dialed in memory."""

    far = None  # the upstream's end

    async def _dial(self):
        assert self.far is None, "the upstream is dialed once"
        server, self.far = socket.socketpair()
        server.setblocking(False)
        self.far.setblocking(False)
        return server


def received(connection):
    """Return the bytes that have arrived."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        return connection.recv(1 << 20)
    return b""


def run_greeting(data):
    """Run a relay pair; input: a number (odd: CURVE is required), then the pieces of a client's
    bytes.
    """
    steps = steps_of(data)
    requires_curve = bool(steps) and type(steps[0]) is int and steps[0] % 2 == 1
    pieces = [piece for piece in steps[:60] if type(piece) is bytes]
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_greet(pieces, requires_curve))
    finally:
        loop.close()


async def _greet(pieces, requires_curve):
    near, client = socket.socketpair()
    near.setblocking(False)
    pipes = PipePool()
    pair = DialedPair(client, None, pipes, requires_curve=requires_curve, dialed=lambda _: None)
    running = asyncio.ensure_future(pair.run())
    sent, forwarded = b"", b""
    try:
        for piece in pieces:
            with contextlib.suppress(ConnectionError, BlockingIOError):
                sent += piece[: near.send(piece)]
            for _ in range(12):  # signature, dialing, the rest, forwarding
                await asyncio.sleep(0)
            forwarded += received(pair.far) if pair.far is not None else b""
            _check_forwarded(sent, forwarded, requires_curve)
            if running.done():
                break
        mechanism = sent[12:32].rstrip(b"\0")
        is_complete = len(sent) >= GREETING_BYTES and _has_signature(sent) and sent[10] >= 3
        is_allowed = mechanism == b"CURVE" or (
            not requires_curve and mechanism in {b"NULL", b"PLAIN", b"GSSAPI"}
        )
        if is_complete and is_allowed:
            assert not running.done(), "a complete greeting is forwarded"
            assert forwarded == sent, "everything is forwarded"
        elif len(sent) >= GREETING_BYTES:
            assert isinstance(running.exception(), Dropped), "any other greeting is dropped"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        pair.close()
        pipes.close()
        near.close()
        if pair.far is not None:
            pair.far.close()


def _has_signature(sent):
    return sent[:1] == b"\xff" and sent[9:10] == b"\x7f"


def _check_forwarded(sent, forwarded, requires_curve):
    assert sent.startswith(forwarded), "what is forwarded is what was received"
    assert not forwarded or _has_signature(sent), "nothing is forwarded before ZMTP's signature"
    if len(forwarded) > SIGNATURE_BYTES:
        assert len(sent) >= GREETING_BYTES, "the upstream receives no more than it needs to answer"
        assert not requires_curve or sent[12:32] == b"CURVE".ljust(20, b"\0")


def greeting_of(mechanism, version=b"\3\1"):
    signature = b"\xff" + bytes(SIGNATURE_BYTES - 2) + b"\x7f"
    return signature + version + mechanism.ljust(20, b"\0") + bytes(32)


def greeting_seeds():
    curve, null = greeting_of(b"CURVE"), greeting_of(b"NULL")
    made = [
        [1, curve, b"then what it says"],
        [0, null + b"then what it says at once"],
        [1, null],
        [1, curve[:10], curve[10:12], curve[12:], b"more"],
        [0, *(null[n : n + 1] for n in range(12)), null[12:63], null[63:]],
        [0, greeting_of(b"PLAIN", b"\1\0")],
        [0, b"GET / HTTP/1.1\r\n\r\n", b"x" * 100],
        [1, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)],
        [0, greeting_of(b"NOBODY"), b"x"],
    ]
    return [msgpack.packb(one) for one in made]


# --- ZAP: keys and their access ---

TRUSTED, UNKNOWN = (KeyPair.new().public for _ in range(2))


class RecordingSocket:
    """A ZAP socket that returns requests, keeps replies, and raises EOFError after the last
    request.
    """

    linger = 0

    def __init__(self, requests):
        self.requests = iter(requests)
        self.replies = []

    def bind(self, address):
        pass

    async def recv_multipart(self):
        for request in self.requests:
            return request
        raise EOFError

    async def send_multipart(self, parts):
        assert all(type(part) is bytes for part in parts)
        self.replies.append(parts)


def run_zap(data):
    """Run the ZAP handler on requests, each a list of frames.

    Each is answered, and with 200 only for CURVE, our domain, and a trusted key.
    """
    requests = [
        [part for part in one if type(part) is bytes]
        for one in steps_of(data)[:40]
        if type(one) is list
    ]
    requests.append(request_of())  # a trusted key is accepted after any other request
    zap, failed = RecordingSocket(requests), []
    limits = ConnectionLimits(TransportSettings(), 0.0)
    handler = ZapHandler(
        SimpleNamespace(socket=lambda _: zap), TRUSTED.__eq__, failed.append, limits.authenticated
    )
    with contextlib.suppress(EOFError):
        handler.run().send(None)
    assert len(zap.replies) == len(requests), "each request is answered: libzmq waits for it"
    for request, reply in zip(requests, zap.replies, strict=True):
        version, number, code, _, user, _ = reply
        assert (version, number) == (b"1.0", request[1] if len(request) > 1 else b"")
        assert code == (b"200" if is_right(request) else b"400")
        assert user == (TRUSTED.encode() if code == b"200" else b""), "a name without a key"
    for one in failed:
        assert len(one.address) <= 64
        assert (one.why == UNKNOWN_KEY) == is_key(one.key), (
            "a message that says how to trust a key has a key"
        )


def is_right(request):
    key = z85.decode(TRUSTED)
    fixed = [b"1.0", ZAP_DOMAIN, b"CURVE", key]
    return len(request) == 7 and [request[n] for n in (0, 2, 5, 6)] == fixed


def request_of(key=TRUSTED, domain=ZAP_DOMAIN):
    return [b"1.0", b"7", domain, b"192.0.2.7", b"a/c/0123abcd", b"CURVE", z85.decode(key)]


def zap_seeds():
    null = [b"1.0", b"1", ZAP_DOMAIN, b"::1", b"a/c/0123abcd", b"NULL"]
    made = [
        [request_of()],
        [request_of(UNKNOWN), request_of()],
        [request_of(domain=b""), null],
        [[], [b"1.0"], [b"0.9", *request_of()[1:]]],
        [[*request_of()[:6], b"short"], [*request_of(), b"more"]],
    ]
    return [msgpack.packb(one) for one in made]


# --- EC2's metadata service ---

TOKEN = "AQAEAtoken=="
ACTION = b'{"action": "terminate", "time": "2099-01-01T00:00:00Z"}'
BASE = "169.254.169.254"


def framed(status, body):
    return b"HTTP/1.1 %d sent\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


class Service:
    """Answers with the input, one answer per connection, and correctly when the input is used
    up.
    """

    def __init__(self, answers):
        self.answers = list(answers)

    def answer(self, request):
        if self.answers:
            return self.answers.pop(0)
        if request.startswith(b"PUT"):
            return framed(200, TOKEN.encode())
        known = f"metadata-token: {TOKEN}\r\n".encode().lower() in request.lower()
        return framed(200, ACTION) if known else framed(401, b"")

    def connected(self, host, **rest):
        """Make an http.client connection."""
        assert host == BASE, "the token goes to the service only"
        connection, sent = http.client.HTTPConnection(host, **rest), bytearray()
        connection.connect = lambda: None
        connection.sock = SimpleNamespace(
            sendall=sent.extend,
            makefile=lambda *_: io.BytesIO(self.answer(bytes(sent))),
            close=lambda: None,
            setsockopt=lambda *_: None,
        )
        return connection


class Opens(urllib.request.BaseHandler):
    """A handler for urllib that opens connections to a `Service`."""

    def __init__(self, service):
        self.service = service
        self.plain = urllib.request.HTTPHandler()

    def default_open(self, request):
        assert request.type == "http", "only the service is asked"
        return self.plain.do_open(self.service.connected, request)


def run_metadata(data):
    """Run the metadata watch on answers: bytes as they are, [status, body] framed as HTTP.

    No answer ends the watch: afterwards it returns a true announcement.
    """
    service, made = Service([]), []
    for one in steps_of(data)[:20]:
        if type(one) is bytes:
            made.append(one)
        elif type(one) is list and len(one) == 2 and type(one[0]) is int and type(one[1]) is bytes:
            made.append(framed(one[0] % 600, one[1]))
    service.answers = made
    watch = SpotWatch()
    watch._opener.add_handler(Opens(service))
    for _ in range(2 * len(made) + 2):
        notice = watch.look()
        assert type(watch.trouble) is str
        assert notice is None or notice.left_s is None or 0 <= notice.left_s < math.inf
        if notice is not None and not service.answers:
            return
    raise AssertionError(f"the announcement is not returned: {watch.trouble}")


def metadata_seeds():
    token, action = [200, TOKEN.encode()], [200, ACTION]
    bodies = [
        {"action": "stop"},
        {"action": "hibernate", "time": "2017-09-18T08:22:00+02:00"},
        {"action": "terminate", "time": 7},
        ["stop"],
    ]
    redirect = (
        b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/latest\r\nContent-Length: 0\r\n\r\n"
    )
    made = [
        [token, action],
        *([token, [200, json.dumps(body).encode()]] for body in bodies),
        [token, [404, b""], [401, b""], token, [503, b"busy"]],
        [redirect],
        [token, redirect],
        [[200, b"a token\r\nX-Other: header"], [200, b"\xff"], [200, b""]],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", token],
        [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\n\r\n", b""],
    ]
    return [msgpack.packb(one) for one in made]


TARGETS = {
    "greeting": Target(run_greeting, (), greeting_seeds, 128, 4 << 20),
    "zap": Target(run_zap, (), zap_seeds),
    "metadata": Target(run_metadata, (), metadata_seeds, 128, 1 << 20),
}

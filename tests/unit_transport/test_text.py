"""Text of a peer is printable, one line and bounded before anything shows it."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsl_transport as tp
from fsl_transport.session import frames
from fsl_transport.text import peer_text, printable
from fsl_transport.zmq.curve import ZAP_DOMAIN, HandshakeFailed, answer_zap

SESSION = b"sessions"
HOSTILE = "\x1b]0;owned\x07\nps: all good\r\u202e"
SHOWN = r"\u001b]0;owned\u0007\u000aps: all good\u000d\u202e"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("", ""),
        ("Überprüfung: 模型 ✓ …", "Überprüfung: 模型 ✓ …"),
        (r"C:\new", r"C:\new"),
        (HOSTILE, SHOWN),
        ("\x00\x7f\x9b", r"\u0000\u007f\u009b"),
        ("\u202a\u202b\u202c\u202d", r"\u202a\u202b\u202c\u202d"),
        ("\u2066\u2067\u2068\u2069", r"\u2066\u2067\u2068\u2069"),
        ("\u200b\u200c\u200d\u200e", r"\u200b\u200c\u200d\u200e"),
        ("\u200f\u2060\ufeff\u061c", r"\u200f\u2060\ufeff\u061c"),
        ("a\u2028b\u2029c\x85d\x0be", r"a\u2028b\u2029c\u0085d\u000be"),
        ("\ud800", r"\ud800"),
        ("\ue000\uffff\U000e0041", r"\ue000\uffff\U000e0041"),
        ("a\tb\u00a0c", r"a\u0009b\u00a0c"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_act_on_is_escaped(raw, shown):
    """Escape sequences, returns, line breaks, bidirectional controls, zero-width characters,
    unassigned characters.
    """
    assert printable(raw) == shown
    assert peer_text(raw, 500) == shown


@given(st.text(), st.integers(1, 40))
def test_any_text_is_one_printable_line_of_at_most_the_limit(text, limit):
    """And escaping it again changes nothing."""
    found = peer_text(text, limit)
    assert len(found) <= limit
    assert found.isprintable()
    assert len(found.splitlines()) <= 1
    assert not {unicodedata.category(one) for one in found} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert peer_text(found, limit) == found
    assert printable(printable(text)) == printable(text)
    if text.isprintable() and len(text) <= limit:
        assert found is text


def parsed(*fields):
    return frames.parse([frames.pack(fields, 1 << 20)], 1 << 20, 0)


@pytest.mark.parametrize(
    "fields",
    [
        (frames.HELLO, frames.PROTOCOL_VERSION, 1, 1, "a", "client\x1b", {}),
        (frames.DATA, SESSION, 1, 0, frames.OFFER, 1, "delta:\n", 1, 0, {}),
        (frames.DATA, SESSION, 1, 0, frames.OFFER, 1, "", 1, 0, {}),
    ],
)
def test_unprintable_identifiers_are_refused(fields):
    """A role or a stream id would become another one by escaping."""
    with pytest.raises(tp.PeerError) as refused:
        parsed(*fields)
    assert str(refused.value).isprintable()


def test_bytes_that_are_no_text_are_not_repeated():
    """The error text of a damaged head appears in a PeerDown, and must stay short."""
    head = frames.pack((frames.BYE, SESSION, "x" * 60_000), 1 << 20).replace(b"xxx", b"\xffxx", 1)
    with pytest.raises(tp.PeerError) as refused:
        frames.parse([head], 1 << 20, 0)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 200


def test_the_address_of_a_failed_handshake_is_printable():
    """It appears in the line that reports it."""
    request = [b"1.0", b"1", ZAP_DOMAIN, b"\x1b[2J\xff" * 40, b"", b"CURVE", bytes(range(32))]
    _, failed = answer_zap(request, lambda _: False)
    assert isinstance(failed, HandshakeFailed)
    assert failed.address.isprintable()
    assert len(failed.address) <= 64

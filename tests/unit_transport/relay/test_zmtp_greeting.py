"""The greeting of ZMTP, which any connection can imitate."""

import pytest

from fsl_transport.relay.zmtp_greeting import is_signature, mechanism_of

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
OPEN = SIGNATURE + b"\3\1"
GOOD = OPEN + b"CURVE".ljust(20, b"\0") + bytes(32)
BAD = {
    "empty": b"",
    "short": GOOD[:63],
    "long": GOOD + b"\0",
    "another signature": b"\xfe" + GOOD[1:],
    "signature that does not end": GOOD[:9] + b"\0" + GOOD[10:],
    "version 2": SIGNATURE + b"\2\0" + GOOD[12:],
    "unknown mechanism": OPEN + b"ROT13".ljust(20, b"\0") + bytes(32),
    "no ASCII": OPEN + bytes(range(200, 220)) + bytes(32),
}


@pytest.mark.parametrize("greeting", BAD.values(), ids=BAD)
def test_what_is_no_greeting(greeting):
    """Nothing of it may pass for a mechanism."""
    assert mechanism_of(greeting) == ""


def test_what_is_a_greeting():
    """Each mechanism of ZMTP 3, of any minor version, whatever the padding of the signature."""
    for name in ("NULL", "PLAIN", "CURVE", "GSSAPI"):
        assert mechanism_of(OPEN + name.encode().ljust(20, b"\0") + bytes(32)) == name
    odd = b"\xff" + bytes(range(8)) + b"\x7f"
    assert is_signature(odd)
    assert mechanism_of(odd + b"\3\0" + GOOD[12:]) == "CURVE"

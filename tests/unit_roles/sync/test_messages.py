"""Messages on the wire: anything but a message is a MessageError."""

import math

import attrs
import pytest

from fsl_async.roles.messages import MAX_BYTES, MAX_TENSORS, MAX_TEXT, MessageError
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.progress import RunPosition


def test_a_field_with_its_default_is_left_out():
    """Messages are small, and a reader takes the default."""
    assert msg.to_wire(msg.Turn(5)) == {"m": "turn/1", "round": 5}
    assert msg.from_wire({"m": "turn/1", "round": 5, "last": False}) == msg.Turn(5)
    announce = msg.to_wire(msg.Announce(3, "d" * 32, RunPosition(tokens=9)))
    assert announce["position"] == {"tokens": 9}
    measured = msg.Measured(2, "d" * 32, 8, 1, b"frame")
    assert msg.to_wire(measured).keys() == {"m", "sequence", "digest", "tokens", "steps", "frame"}


def test_scalars_stand_for_a_delta_of_zeroth_order():
    measured = msg.Measured(2, "d" * 32, 8, 1, b"frame", {"loss": 1.0}, {"epsilon": 2.0})
    expected = Delta(DeltaKey("a", 7, 3, 2), "d" * 32, 8, 1, 3, {"loss": 1.0}, {})
    expected.facts.update(order=0.0, epsilon=2.0)
    assert measured.delta("a", 7, 3) == expected


POSITION = attrs.asdict(RunPosition())
ANNOUNCE = {"m": "announce/2", "version": 0, "digest": "d" * 32, "position": POSITION}
ATTACH = msg.to_wire(msg.Attach("d" * 32, [], []))
MEASURED = msg.to_wire(msg.Measured(1, "d" * 32, 1, 1, b"x"))
META = msg.DeltaMeta(Delta(DeltaKey("a", 1, 0, 0), "d" * 32, 1, 1, 1))


def meta(**changed):
    """The metadata of a delta on the wire, with changed fields."""
    wire = msg.to_wire(META)
    return wire | {"delta": wire["delta"] | changed}


WRONG = {
    "wrong-type": [
        ([], "a message is a map"),
        ({"m": "call/1", "round": None, "last": False}, "Call.round is NoneType"),
        ({"m": "call/1", "round": 1, "last": None}, "Call.last is NoneType"),
        (MEASURED | {"frame": "x"}, "Measured.frame is str, not bytes"),
        ({"m": "call/1", "round": True, "last": False}, "Call.round is bool, not int"),
        ({"m": "call/1", "round": 1.0, "last": False}, "Call.round is float"),
        ({"m": "stop/1", "reason": b"x"}, "Stop.reason is bytes"),
        (ATTACH | {"manifest": {}}, "is dict, not list"),
        (ATTACH | {"frozen": "no"}, "frozen is str, not list"),
        (ANNOUNCE | {"position": POSITION | {"tokens": 1.0}}, "tokens is float, not int"),
        (meta(metrics={"a": [1]}), "metrics maps texts to numbers and texts"),
        (msg.to_wire(META) | {"delta": []}, "DeltaMeta.delta is list, not a map"),
    ],
    "unknown-message": [
        ({}, "unknown message"),
        ({"m": ["call/1"]}, "unknown message"),
        ({"m": "x" * 1000}, "unknown message xxx"),
        ({"m": "\x1b]0;"}, "unknown message .u001b]0;"),
        ({"m": "Message"}, "unknown message"),
    ],
    "missing-field": [
        ({"m": "call/1"}, "Call lacks round"),
        ({"m": "call/1", "rounds": 1, "last": False}, "Call lacks round"),
    ],
    "unknown-field": [
        ({"m": "call/1", "round": 1, "last": True, "more": 1}, "has 3 fields, of which 2 are"),
        (meta(more=1), "DeltaMeta.delta has 6 fields, of which 5 are known"),
    ],
    "too-long": [
        (MEASURED | {"frame": bytes(MAX_BYTES + 1)}, "frame is longer than 65536 bytes"),
        ({"m": "stop/1", "reason": "x" * (MAX_TEXT + 1)}, "longer than"),
        (ATTACH | {"manifest": [0] * (MAX_TENSORS + 1)}, "more than"),
        (
            meta(metrics={str(number): 0.0 for number in range(65)}),
            "DeltaMeta.delta.metrics has more than",
        ),
    ],
    "wrong-form": [
        (MEASURED | {"digest": ""}, "digest is not a digest"),
        (ATTACH | {"fingerprint": "d" * 31}, "fingerprint is not a digest"),
        (ANNOUNCE | {"digest": ""}, "digest is not a digest"),
        (ANNOUNCE | {"position": POSITION | {"progress": 1.5}}, "from 0 to 1, not 1.5"),
        (ANNOUNCE | {"position": POSITION | {"progress": math.nan}}, "from 0 to 1, not nan"),
        (ANNOUNCE | {"position": POSITION | {"pace_per_s": math.inf}}, "at least 0, not inf"),
        ({"m": "holding/1", "version": 0, "digest": "D" * 32}, "digest is not a digest"),
        ({"m": "fetch/1", "version": 0, "digest": "no"}, "is not a digest, nor empty: no"),
        ({"m": "accepted/1", "key": "a b/1/2/3"}, "Accepted.key is not a delta key: a b/1/2/3"),
        ({"m": "accepted/1", "key": "a/1\x1b/2/3"}, "is not a delta key: a/1.u001b/2/3"),
        ({"m": "reject/1", "code": "two words", "text": ""}, "Reject.code is not a code"),
        ({"m": "version_meta/1", "kind": "half", "version": 0}, "is not a kind of version: half"),
        (meta(key="a/1/2"), "DeltaMeta.delta.key is not a delta key: a/1/2"),
    ],
    "out-of-range": [
        ({"m": "call/1", "round": -2, "last": False}, "out of range"),
        ({"m": "call/1", "round": 1 << 63, "last": False}, "out of range"),
    ],
}


@pytest.mark.parametrize(
    ("code", "wire", "words"), [(code, *one) for code, found in WRONG.items() for one in found]
)
def test_the_error_names_the_field(code, wire, words):
    """The line in the log names the field and the message; status shows the code."""
    with pytest.raises(MessageError, match=words) as found:
        msg.from_wire(wire)
    assert found.value.code == code


NO_KEYS = ["", "a", "a b/1/2/3", "\x1b/1/2/3", "a/1/2", "a/1/2/3/4", "/1/2/3", "a/-1/2/3"]


@pytest.mark.parametrize("text", [*NO_KEYS, "a/1/x/3", "a/1//3", "a/1/²/3"])
def test_other_texts_are_no_keys(text):
    """A peer's key is checked before it becomes a file name."""
    with pytest.raises(ValueError, match="not a delta key"):
        DeltaKey.parse(text)


def test_stream_names():
    """Machines distinguish streams by these prefixes; a resume needs the full name."""
    assert msg.delta_stream("a/1/2/3") == "delta:a/1/2/3"
    assert msg.initial_stream("a", 7) == "initial:a/7"
    assert msg.version_stream("update", 4) == "update:4"

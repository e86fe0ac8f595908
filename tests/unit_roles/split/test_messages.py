"""Messages of split learning on the wire, and the keys of uploads."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import UploadKey
from fsl_async.roles.sync import messages as other

KINDS = sorted(msg.TABLE.types.values(), key=lambda cls: cls.__name__)
PRINTABLE = st.text(max_size=20).filter(str.isprintable)
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True)
COUNTS = st.integers(0, 1 << 62)
KEYS = st.builds(UploadKey, NAMES, COUNTS, COUNTS, COUNTS, st.integers(0, 1))
VALUES = {
    "bool": st.booleans(),
    "str": PRINTABLE,
    "Run": NAMES,
    "OptionalRun": NAMES | st.just(""),
    "Role": NAMES,
    "Key": KEYS,
    "OptionalKey": KEYS.map(lambda key: key.text) | st.just(""),
    "Code": st.sampled_from(["later", "refused"]),
    "float": st.floats(allow_nan=False),
    "int": st.integers(-1, (1 << 63) - 1),
    "list[Any]": st.lists(st.integers(1, 99), min_size=1, max_size=3),
    "dict[str, Any]": st.dictionaries(PRINTABLE, PRINTABLE, max_size=3),
}
NUMBERS = st.dictionaries(PRINTABLE, st.floats(allow_nan=False, allow_infinity=False), max_size=3)
SAMPLES = st.integers(-1, msg.MAX_SIZE)
META = msg.SmashedMeta(UploadKey("a", 1, 0, 0), 0, -1, [2, 3], [], 2, 4, False, False)
HELLO = msg.SplitHello("r", msg.ROLE, 0, {"cut": "1"}, -1, -1, 0)


def messages(cls):
    values = {f.name: VALUES[str(f.type)] for f in attrs.fields(cls)}
    counts = {name: SAMPLES for name in ("samples", "done_samples") if name in values}
    errors = {"errors": NUMBERS} if cls is msg.RoundDone else {}
    return st.builds(cls, **values | counts | errors)


@given(st.sampled_from(KINDS).flatmap(messages))
def test_every_message_comes_back(message):
    """A peer reads the message that was sent.

    Parameter server and split server do not accept each other's messages.
    """
    assert msg.from_wire(msg.to_wire(message)) == message
    with pytest.raises(MessageError):
        other.from_wire(msg.to_wire(message))


@pytest.mark.parametrize(
    ("message", "change", "words"),
    [
        (META, {"shape": []}, "shape is not 1 to 8"),
        (META, {"shape": [1] * 9}, "shape is not 1 to 8"),
        (META, {"shape": [0]}, "shape is not"),
        (META, {"shape": [True]}, "shape is not"),
        (META, {"shape": [1 << 41]}, "shape is not"),
        (META, {"lengths": [0]}, "lengths are not"),
        (META, {"lengths": ["x"]}, "lengths are not"),
        (META, {"samples": True}, "samples is bool"),
        (HELLO, {"architecture": {"cut": 1}}, "maps texts to texts"),
        (HELLO, {"architecture": {1: "x"}}, "maps texts to"),
        (HELLO, {"run": "r\n"}, "run is not the name of a run, nor empty"),
        (HELLO, {"role": "\x1b"}, "role is not a role"),
        (META, {"key": "a/1/0"}, "key is not an upload key: a/1/0"),
        (msg.Trained(UploadKey("a", 1, 0, 0), 1.0), {"loss": 1}, "loss is int, not float"),
        (msg.RoundDone(0, 1), {"errors": {"up": 1}}, "texts to finite numbers"),
        (msg.RoundDone(0, 1), {"samples": 1 << 41}, "RoundDone.samples is out of range"),
        (msg.RoundDone(0, 1), {"errors": {"up": float("inf")}}, "texts to finite numbers"),
    ],
)
def test_what_is_wrong_is_named(message, change, words):
    """The bytes come from unauthenticated peers."""
    with pytest.raises(MessageError, match=words):
        msg.from_wire({**msg.to_wire(message), **change})


def test_text_for_people_is_printable_and_one_line():
    """What differs between two models is shown at both, and so are the names of coding errors."""
    wire = {**msg.to_wire(HELLO), "architecture": {"cut\x1b[2J": "1\n"}}
    assert msg.from_wire(wire).architecture == {r"cut\u001b[2J": r"1\u000a"}
    errors = {"m": "round_done/1", "round": 0, "samples": 1, "errors": {"\r up": 0.5}}
    assert msg.from_wire(errors).errors == {r"\u000d up": 0.5}


@pytest.mark.parametrize(
    "text",
    ["", "a", "a/1/2", "a/1/2/3/0", "a/1/2/3/2", "a/1/2/3/1/1", "/1/2/3", "a/-1/2/3", "a/1/x/3"],
)
def test_other_texts_are_no_keys(text):
    """A peer's key becomes a line in a ledger."""
    with pytest.raises(ValueError, match="not an upload key"):
        UploadKey.parse(text)

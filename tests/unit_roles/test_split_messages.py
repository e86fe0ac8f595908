"""Messages of split learning on the wire, and the keys of uploads."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async import messages as other
from fsl_async import messages_split as msg
from fsl_async.events_split import UploadKey
from fsl_async.messages import MessageError

KINDS = sorted(msg.TABLE.types.values(), key=lambda cls: cls.__name__)
VALUES = {
    "bool": st.booleans(),
    "str": st.text(max_size=20),
    "float": st.floats(allow_nan=False),
    "int": st.integers(-1, (1 << 63) - 1),
    "list[Any]": st.lists(st.integers(1, 99), min_size=1, max_size=3),
    "dict[str, Any]": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
}
NUMBERS = st.dictionaries(
    st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False), max_size=3
)
META = msg.SmashedMeta("a/1/0/0", 0, -1, [2, 3], [], 2, 4, False, False)
HELLO = msg.SplitHello("r", msg.ROLE, 0, {"cut": "1"}, -1, -1, 0)


def messages(cls):
    values = {f.name: VALUES[str(f.type)] for f in attrs.fields(cls)}
    return st.builds(cls, **values | ({"errors": NUMBERS} if cls is msg.RoundDone else {}))


@given(st.sampled_from(KINDS).flatmap(messages))
def test_every_message_comes_back(message):
    """What one side says is what the other side hears; neither server takes what is meant for the other."""
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
        (HELLO, {"architecture": {1: "x"}}, "maps texts to texts"),
        (msg.Trained("k", 1.0), {"loss": 1}, "loss is int, not float"),
        (msg.RoundDone(0, 1), {"errors": {"up": 1}}, "texts to finite numbers"),
        (msg.RoundDone(0, 1), {"errors": {"up": float("inf")}}, "texts to finite numbers"),
    ],
)
def test_what_is_wrong_is_named(message, change, words):
    """The bytes come from strangers."""
    with pytest.raises(MessageError, match=words):
        msg.from_wire({**msg.to_wire(message), **change})


@given(st.text(max_size=12), *[st.integers(0, 1 << 62)] * 3, st.integers(0, 1))
def test_upload_keys_come_back(client, incarnation, number, step, leg):
    """The key decides whether an upload was trained already."""
    key = UploadKey(client, incarnation, number, step, leg)
    if client and "/" not in client:
        assert UploadKey.parse(key.text) == key
        assert UploadKey.parse(key.first_leg.text).leg == 0


@pytest.mark.parametrize(
    "text",
    ["", "a", "a/1/2", "a/1/2/3/0", "a/1/2/3/2", "a/1/2/3/1/1", "/1/2/3", "a/-1/2/3", "a/1/x/3"],
)
def test_other_texts_are_no_keys(text):
    """A peer's key becomes a line in a ledger."""
    with pytest.raises(ValueError, match="not an upload key"):
        UploadKey.parse(text)


def test_stream_names():
    """The machines tell streams apart by these prefixes."""
    assert msg.upload_stream("a/1/2/3") == "up:a/1/2/3"
    assert msg.answer_stream("a/1/2/3") == "down:a/1/2/3"
    assert msg.auxiliary_stream("a", 3) == "aux:a/3"

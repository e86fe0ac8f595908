"""Messages of split learning on the wire, and the keys of uploads."""

import pytest

from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.messages import UploadKey

META = msg.SmashedMeta(UploadKey("a", 1, 0, 0), 0, -1, [2, 3], [], 2, 4, False, False)
HELLO = msg.SplitHello("r", msg.ROLE, 0, {"cut": "1"}, -1, -1, 0)


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


@pytest.mark.parametrize(
    "text",
    ["", "a", "a/1/2", "a/1/2/3/0", "a/1/2/3/2", "a/1/2/3/1/1", "/1/2/3", "a/-1/2/3", "a/1/x/3"],
)
def test_other_texts_are_no_keys(text):
    """A peer's key becomes a line in a ledger."""
    with pytest.raises(ValueError, match="not an upload key"):
        UploadKey.parse(text)

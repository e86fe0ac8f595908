"""Hello, welcome and stream names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.messages import MAX_TEXT, MessageError
from fsl_async.shells import wire

JUNK = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary() | st.just({})
HELLO = {"run": "r", "version": 3, "digest": "d", "shard": -1}
WELCOME = {"run": "r", "shard": 1, "shards": 4, "config": {"a": 1}}


def test_hello_and_welcome_come_back():
    """What one side says is what the other side hears."""
    assert wire.Hello.from_wire(HELLO).to_wire() == HELLO
    assert wire.Welcome.from_wire(WELCOME).to_wire() == WELCOME


@pytest.mark.parametrize(
    ("read", "good"), [(wire.Hello.from_wire, HELLO), (wire.Welcome.from_wire, WELCOME)]
)
def test_missing_and_wrong_fields_are_refused(read, good):
    """The very first bytes of a stranger are read here."""
    for name, value in good.items():
        with pytest.raises(MessageError, match=name):
            read({key: one for key, one in good.items() if key != name})
        with pytest.raises(MessageError, match=name):
            read({**good, name: b"bytes"})
        if isinstance(value, int):
            with pytest.raises(MessageError, match=name):
                read({**good, name: True})
        if isinstance(value, str):
            with pytest.raises(MessageError, match="longer than"):
                read({**good, name: "x" * (MAX_TEXT + 1)})


@given(st.dictionaries(st.sampled_from([*HELLO, *WELCOME, "other"]), JUNK))
def test_junk_is_refused(body):
    """Only MessageError may come of a hostile hello or welcome."""
    for read in (wire.Hello.from_wire, wire.Welcome.from_wire):
        try:
            back = read(body).to_wire()
        except MessageError:
            continue
        assert all(body[name] == value for name, value in back.items())


def test_stream_names():
    """The machines tell streams apart by these prefixes, and a resume finds its transfer by the whole name."""
    assert wire.delta_stream("a/1/2/3") == "delta:a/1/2/3"
    assert wire.initial_stream("a", 7) == "initial:a/7"
    assert wire.version_stream("update", 4) == "update:4"

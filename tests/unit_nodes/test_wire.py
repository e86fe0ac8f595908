"""Hello, welcome and stream names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.nodes import wire
from fsl_async.roles.messages import MAX_TEXT, MessageError

JUNK = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary() | st.just({})
HELLO = {"run": "r", "version": 3, "digest": "d" * 32, "shard": -1}
WELCOME = {"run": "r", "shard": 1, "shards": 4, "config": {"a": 1}}


def test_hello_and_welcome_are_read_back():
    """A peer reads the map that was sent."""
    assert wire.Hello.from_wire(HELLO).to_wire() == HELLO
    assert wire.Welcome.from_wire(WELCOME).to_wire() == WELCOME
    found = wire.Welcome.from_wire({**WELCOME, "position": {"data_at": 7, "other": 1}})
    assert found.to_wire() == {**WELCOME, "position": {"data_at": 7.0}}


@pytest.mark.parametrize("value", [-1, 0.5, 1 << 53, float("nan"), float("inf"), True, "1", None])
def test_a_position_is_of_whole_numbers(value):
    """It becomes an index into a site's data."""
    with pytest.raises(MessageError, match="data_at is no whole number"):
        wire.Welcome.from_wire({**WELCOME, "position": {"data_at": value}})
    with pytest.raises(MessageError, match="position is list"):
        wire.Welcome.from_wire({**WELCOME, "position": [1]})


@pytest.mark.parametrize(
    ("read", "good"), [(wire.Hello.from_wire, HELLO), (wire.Welcome.from_wire, WELCOME)]
)
def test_missing_and_wrong_fields_are_refused(read, good):
    """These are the first bytes read from an unauthenticated peer."""
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


@pytest.mark.parametrize(
    ("read", "body", "name"),
    [
        (wire.Hello.from_wire, {**HELLO, "run": "r\n"}, "run"),
        (wire.Hello.from_wire, {**HELLO, "digest": "\x1b" * 32}, "digest"),
        (wire.Hello.from_wire, {**HELLO, "digest": "d" * 33}, "digest"),
        (wire.Welcome.from_wire, {**WELCOME, "run": ""}, "run"),
        (wire.Welcome.from_wire, {**WELCOME, "run": "\x1b]0;owned\x07"}, "run"),
    ],
)
def test_what_is_compared_has_its_exact_form(read, body, name):
    """A run's name or a digest of another form is refused, with a printable error."""
    with pytest.raises(MessageError, match=f"^{name} is not") as refused:
        read(body)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("number", [-2, 1 << 63])
def test_numbers_have_the_range_of_messages(number):
    """Every integer has the range in docs/WIRE.md."""
    with pytest.raises(MessageError, match="version is out of range"):
        wire.Hello.from_wire({**HELLO, "version": number})
    with pytest.raises(MessageError, match="out of range"):
        wire.Welcome.from_wire({**WELCOME, "shards": 1 << 63})


def test_a_heartbeat_has_numbers_and_printable_text():
    """Its map is written to the journal and shown."""
    sent = {"step": 3, "loss": 2.5, "hung": None, "up": True, "\x1b[2J": "a\nb", "deep": {"\r": 1}}
    sent |= {str(number): number for number in range(100)} | {"z": "x" * 4096}
    found = wire.beat_of(sent)
    assert list(found)[:5] == ["step", "loss", "hung", "up", r"\u001b[2J"]
    assert found[r"\u001b[2J"] == r"a\u000ab"
    assert "deep" not in found
    assert len(found) == wire.MAX_BEAT_ENTRIES - 1
    assert len(wire.beat_of({"z" * 999: "x" * 999})["z" * 255 + "…"]) == wire.MAX_BEAT_TEXT

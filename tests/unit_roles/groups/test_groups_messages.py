"""The messages between parameter servers: read back, and refused in any other form."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_async.roles.groups import messages as msg
from fsl_async.roles.messages import MessageError

DIGEST = "0123456789abcdef" * 2
MESSAGES = [
    msg.GroupHello(),
    msg.GroupWelcome(),
    msg.AskGlobal(-1, ""),
    msg.AskGlobal(3, DIGEST, DIGEST),
    msg.Decided(3, 9, DIGEST, True, DIGEST),
    msg.VersionMade(7),
    msg.Ending(True),
    msg.AllEnded(),
    msg.Poll(3),
    msg.Promise(3, 20, DIGEST, 5, 15, 1, 1 << 14),
    msg.View(3, 9, [["a", DIGEST, 0.5], ["b", DIGEST, 0.0]], 1 << 24),
    msg.View(3, 9, [["a", DIGEST, 0.5], ["b", DIGEST, 0.0]], 1, {"format": "e4m3"}),
    msg.Address(9, "0", b"\x02\x00"),
    msg.Reported(3, 9, DIGEST),
    msg.Failed(3, 9, "reset"),
    msg.Dropped(3, 9, "reset"),
    msg.FetchGlobal(3, True),
    msg.FetchGlobal(3),
    msg.GlobalModel([["w", [2, 3], 0]], [["b", "bfloat16 2x3", "a" * 16]]),
    msg.GlobalMeta(3, DIGEST),
]
# The same examples in each run, and no folder shared with other processes: what fails, fails again.
SAME = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=4,
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: one.tag)
def test_every_message_is_read_back(message):
    """All of the table but a share, which is a part of a view."""
    assert msg.from_wire(msg.to_wire(message)) == message
    assert {one.tag for one in MESSAGES} | {msg.Share.tag} == set(msg.TABLE.types)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: one.tag)
@SAME
@given(st.data())
def test_any_other_field_is_read_or_refused(message, data):
    """No other error, whatever a peer sends."""
    wire = msg.to_wire(message)
    if len(wire) > 1:
        name = data.draw(st.sampled_from(sorted(wire.keys() - {"m"})))
        wire = {**wire, name: data.draw(PLAIN)}
    else:
        wire = {**wire, "more": data.draw(PLAIN)}
    try:
        found = msg.from_wire(wire)
    except MessageError as error:
        found = error
    assert isinstance(found, MessageError) or type(found) is type(message)
    assert isinstance(found, type(message)) or str(found).isprintable()


@pytest.mark.parametrize(
    "wire", [{"begin": 10}, {"end": 10**16}, {"behind": 4}, {"behind": -1}, {"begin": -1}]
)
def test_a_promise_is_a_range(wire):
    """Tokens are a weight, so they have a limit, and no group is older than the run."""
    good = msg.to_wire(msg.Promise(3, 20, DIGEST, 5, 9, 1, 1 << 14))
    with pytest.raises(MessageError):
        msg.from_wire({**good, **wire})

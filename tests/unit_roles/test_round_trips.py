"""Messages of clients and both servers on the wire: what is sent is read back unchanged."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as split
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.sync import messages as sync
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.roles.sync.roster import Roster

PRINTABLE = st.text(max_size=20).filter(str.isprintable)
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True)
NUMBERS = st.integers(0, 1 << 62)
INTS = st.integers(-1, (1 << 63) - 1)
DIGESTS = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
DELTAS = st.builds(DeltaKey, NAMES, NUMBERS, NUMBERS, NUMBERS)
UPLOADS = st.builds(UploadKey, NAMES, NUMBERS, NUMBERS, NUMBERS, st.integers(0, 1))
METRICS = st.dictionaries(PRINTABLE, st.floats(allow_nan=False), max_size=3)
PARTS = st.floats(0, 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.integers(-1, split.MAX_SIZE)
VALUES = {
    "bool": st.booleans(),
    "str": PRINTABLE,
    "Digest": DIGESTS,
    "OptionalDigest": DIGESTS | st.just(""),
    "Delta": st.builds(Delta, DELTAS, DIGESTS | st.just(""), INTS, INTS, INTS, METRICS),
    "Code": st.sampled_from(["later", "stale", "model", "quarantined"]),
    "VersionKind": st.sampled_from(["update", "seeds", "full"]),
    "bytes": st.binary(max_size=50),
    "RunPosition": st.builds(
        RunPosition, NUMBERS, NUMBERS, st.booleans(), PARTS, st.floats(0, 1e9), PARTS, PARTS
    ),
    "int": INTS,
    "float": st.floats(allow_nan=False),
    "list[Any]": st.lists(st.integers(1, 99), min_size=1, max_size=3),
    "dict[str, Any]": METRICS,
    "Run": NAMES,
    "OptionalRun": NAMES | st.just(""),
    "Role": NAMES,
    "Client": NAMES,
    "OptionalClient": NAMES | st.just(""),
    "OptionalKey": UPLOADS.map(lambda key: key.text) | st.just(""),
}
KEY = st.binary(min_size=32, max_size=32)
ROWS = st.lists(
    st.tuples(NAMES, st.binary(max_size=256)).map(list), max_size=3, unique_by=lambda row: row[0]
)
MEMBERS = st.lists(
    st.tuples(NAMES, KEY, KEY).map(list), min_size=3, max_size=5, unique_by=lambda row: row[0]
)
VALUES["Roster"] = st.builds(Roster, INTS, INTS, st.floats(1e-9, 1e9), st.integers(2, 24), MEMBERS)
FIELDS = {
    "prompt": st.sampled_from([b"\1\0\0\0", b"\1\0\0\0\2\0\0\0"]),
    "answers": st.lists(
        st.tuples(st.just(b"\1\0\0\0"), st.just(b"\0\0\0\0"), FINITE).map(list),
        min_size=2,
        max_size=3,
    ),
    "sites": st.lists(NAMES, max_size=3, unique=True),
    "shares": ROWS,
    "survivors": st.lists(NAMES, max_size=3, unique=True),
    "loss": FINITE,
    "alone": FINITE,
    "left_out": FINITE,
    "deltas": st.lists(st.tuples(DELTAS.map(lambda key: key.text), PARTS).map(list), max_size=3),
    "samples": SAMPLES,
    "done_samples": SAMPLES,
    "errors": st.dictionaries(PRINTABLE, PARTS, max_size=3),
    "architecture": st.dictionaries(PRINTABLE, PRINTABLE, max_size=3),
}


def messages(table):
    """Any message of a table with any allowed values."""
    values = VALUES | {"Key": DELTAS if table is sync.TABLE else UPLOADS}
    made = [
        st.builds(
            kind,
            **{
                one.name: KEY
                if kind is sync.SecureKey and str(one.type) == "bytes"
                else FIELDS[one.name]
                if one.name in FIELDS
                else values[str(one.type)]
                for one in attrs.fields(kind)
            },
        )
        for kind in table.types.values()
    ]
    return st.one_of(made)


@pytest.mark.parametrize(("table", "other"), [(sync, split), (split, sync)])
@given(st.data())
def test_every_message_is_read_back(table, other, data):
    """Parameter server and split server do not accept each other's messages."""
    message = data.draw(messages(table.TABLE))
    assert table.from_wire(table.to_wire(message)) == message
    with pytest.raises(MessageError) as found:
        other.from_wire(table.to_wire(message))
    assert found.value.code == "unknown-message"

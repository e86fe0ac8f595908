"""A peer's text is made printable before it reaches a terminal, a journal or an error.

Tested for every field of every message, at every kind of node.
"""

from operator import attrgetter

import attrs
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from target_parts import memory_folder
from text_nodes import HOSTILE, NODES, TABLES, bodies_of, heads_of, node, play_body, play_head

from fsl_async.config import load as configs
from fsl_async.config.settings import TABLES as CONFIG_TABLES
from fsl_async.errors import FslError, describe
from fsl_async.nodes import wire
from fsl_async.roles.messages import MessageError

FEW = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
ALPHABET = st.characters(exclude_categories=["Cs"]) | st.sampled_from(
    "\x00\x07\x08\t\n\x0b\r\x1b\x7f\x85\x9b\xa0\u200b\u200e\u202e\u2028\u2066\ufeff\ue000\uffff\U000e0041a/:[;m"
)
TEXTS = st.text(ALPHABET, min_size=1, max_size=40) | st.sampled_from([HOSTILE * 20, "\x1b" * 1024])
MESSAGES = [(table, name) for table, known in TABLES.items() for name in known.types]


def texts_of(value):
    """Return the texts in a field that is a text or a map; lists are checked where they are
    used.
    """
    if isinstance(value, dict):
        return [one for entry in value.items() for one in entry if isinstance(one, str)]
    return [value] if isinstance(value, str) else [value.text] if hasattr(value, "text") else []


def read_or_refused(read, error):
    """Return (what was read, "") or (None, the refusal's text)."""
    try:
        return read(), ""
    except error as refused:
        return None, describe(refused).message if error is FslError else str(refused)


@pytest.mark.parametrize("kind", NODES, ids=lambda kind: kind.__name__)
@FEW
@given(TEXTS)
@example(HOSTILE)
def test_heads_of_the_transport(kind, text):
    """Names, roles, stream ids, codes, reasons, texts, and maps of any shape."""
    for head in heads_of(text):
        if head[0] in kind.kinds:
            with memory_folder() as folder, node(kind, folder) as (made, _):
                play_head(made, *head)


@pytest.mark.parametrize("kind", NODES, ids=lambda kind: kind.__name__)
@FEW
@given(TEXTS)
@example(HOSTILE)
def test_fields_of_messages(kind, text):
    """Fields of both tables: as a message, in an offer, in a heartbeat, in hello and welcome."""
    for table, name in MESSAGES:
        for _, body in bodies_of(TABLES[table], name, text):
            with memory_folder() as folder, node(kind, folder) as (made, _):
                play_body(made, body)


@pytest.mark.parametrize(("table", "name"), MESSAGES, ids=lambda value: value)
@MANY
@given(TEXTS)
@example(HOSTILE)
def test_what_is_read_of_a_message(table, name, text):
    """A field is refused or printable, and so is the text of the refusal."""
    for field, body in bodies_of(TABLES[table], name, text):
        found, problem = read_or_refused(
            lambda body=body: TABLES[table].from_wire(body), MessageError
        )
        assert problem.isprintable()
        assert len(problem) < 300
        if found is not None:
            assert all(one.isprintable() for one in texts_of(attrgetter(field)(found)))


@MANY
@given(TEXTS)
@example(HOSTILE)
def test_hello_welcome_and_heartbeat(text):
    """Bodies that are in no table of messages."""
    hello = wire.Hello("r", 0, "d" * 32, 0).to_wire()
    welcome = wire.Welcome("r", 0, 1, {}).to_wire()
    for kind, good in ((wire.Hello, hello), (wire.Welcome, welcome)):
        for field in attrs.fields(kind):
            for bad in (good | {field.name: text}, good | {text: 0}):
                found, problem = read_or_refused(
                    lambda bad=bad, kind=kind: kind.from_wire(bad), MessageError
                )
                assert problem.isprintable()
                values = () if found is None else attrs.astuple(found)
                assert all(one.isprintable() for one in values if isinstance(one, str))
    beat = wire.beat_of({text: 1, "a": text, "b": [text], "c": {text: text}})
    assert all(one.isprintable() for one in texts_of(beat))


@MANY
@given(TEXTS)
@example(HOSTILE)
def test_the_configuration_of_a_welcome(text):
    """A client reads it from an untrusted server: names of tables and keys, and every setting."""
    bad = [{text: {}}, {"run": {text: 1}}, {"run": text}]
    for name, table in CONFIG_TABLES.items():
        bad += [{name: {field.name: text}} for field in attrs.fields(table)]
        bad += [{name: {text: text}}, {name: text}]
    for tables in bad:
        found, problem = read_or_refused(lambda tables=tables: configs.from_wire(tables), FslError)
        assert problem.isprintable()
        if found is not None:
            assert all(
                line.isprintable() for line in configs.to_toml(found, comments=False).split("\n")
            )

"""A peer's hostile text is shown as one printable line, complete, at clients, ps and split server.

The shells are those of real nodes (`text_nodes`). Each test names the text it expects, so that it
fails where none is shown.
"""

import numpy as np
import pytest
from deltas import delta_of
from target_parts import ATTACKER, memory_folder
from text_nodes import (
    HOSTILE,
    SHOWN,
    Client,
    ParameterServer,
    SplitClient,
    SplitServer,
    node,
)

from fsl_async.roles.split import messages as split
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.disk.chunk_files import digest_of
from fsl_transport.session import frames

DIGEST = "d" * 32
KEY = DeltaKey(ATTACKER, 1, 0, 0)


def outputs_of(kind, play):
    """Let a peer act on a node; returns everything that the node printed, journaled and raised."""
    with memory_folder() as folder, node(kind, folder) as (made, outputs):
        play(made)
    return outputs


def sends(table, message, **changed):
    """Make a play that sends one message, with fields that its class would refuse."""
    body = table.to_wire(message) | changed
    return lambda made: made.send(frames.DATA, frames.MESSAGE, body)


# --- a hostile server, and the client's terminal ---


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (sends(msg, msg.Stop(HOSTILE)), SHOWN),
        (sends(msg, msg.Reject("model", HOSTILE)), SHOWN),
        (lambda made: made.refuse("run", HOSTILE), SHOWN),
        (
            lambda made: made.send(frames.DATA, frames.MESSAGE, {"m": HOSTILE}),
            "unknown message \\u001b]0;owned",
        ),
        (
            lambda made: made.greet(made.body() | {"run": HOSTILE}),
            f"run is not the name of a run: {SHOWN}",
        ),
        (
            lambda made: made.greet(made.body() | {"config": {"run": {"name": HOSTILE}}}),
            SHOWN.replace(r"\u202e", ""),
        ),
    ],
)
def test_a_server_writes_one_printable_line_at_a_client(play, expected):
    """In what the client prints, in what it journals, and in the error with which it ends."""
    outputs = outputs_of(Client, play)
    assert any(expected in one for one in [*outputs.lines, *outputs.texts]), outputs.lines


def test_a_delta_is_declined_in_one_printable_line():
    """The client prints why a delta was not merged."""

    def play(made):
        made.send(frames.DATA, frames.MESSAGE, msg.to_wire(msg.Announce(0, DIGEST)))
        machine = made.shell.machine

        machine.delta, machine.coded = delta_of(KEY, 8), True
        sends(msg, msg.Declined(KEY, "stale", HOSTILE))(made)

    outputs = outputs_of(Client, play)
    assert any(
        one.startswith(f"the parameter server refused a delta of 8 tokens: {SHOWN}")
        for one in outputs.lines
    )


def test_a_split_server_writes_one_printable_line():
    """At its clients."""
    outputs = outputs_of(SplitClient, sends(split, split.Ended(HOSTILE)))
    assert any(r"\u001b]0;owned" in one for one in [*outputs.lines, *outputs.texts])


# --- a hostile client, and the servers' terminals ---


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (sends(msg, msg.Skip(0, HOSTILE)), SHOWN),
        (
            sends(msg, msg.Holding(0, HOSTILE)),
            f"{ATTACKER} broke the protocol: Holding.digest is not a digest: {SHOWN}",
        ),
        (
            sends(msg, msg.Attach(DIGEST, [[HOSTILE, [1], 0, False]], [])),
            f"no tensor may be called '{SHOWN}'",
        ),
        (
            lambda made: made.send(frames.BYE, f"relaunch 7: {HOSTILE}"),
            f"{ATTACKER} is launched again in 12 s, unless it comes back by itself ({SHOWN})",
        ),
    ],
)
def test_a_client_writes_one_printable_line_at_a_parameter_server(play, expected):
    """In its log, in its journal, and in its line about a relaunch."""
    outputs = outputs_of(ParameterServer, play)
    assert any(expected in one for one in [*outputs.lines, *outputs.texts]), outputs.lines


def test_a_model_of_another_shape_is_named_in_one_printable_line():
    """The refusal names the first tensor that differs."""
    other = [["größe", [3], 0, False]]
    outputs = outputs_of(ParameterServer, sends(msg, msg.Attach(DIGEST, other, [])))
    assert any("and 'größe' 3 there" in one or "'größe' 3 here" in one for one in outputs.lines), (
        outputs.lines
    )


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (sends(split, split.RunOver(HOSTILE)), SHOWN),
        (sends(split, split.RoundDone(0, 2, {}), errors={HOSTILE: 0.5}), SHOWN),
        (lambda made: made.send(frames.BEAT, 0, False, {HOSTILE: HOSTILE}), SHOWN),
        (
            lambda made: made.greet(
                split.to_wire(split.SplitHello("r", split.ROLE, 0, {"method": HOSTILE}, -1, -1, 0))
            ),
            f"method of {ATTACKER} is {SHOWN}",
        ),
    ],
)
def test_a_client_writes_one_printable_line_at_a_split_server(play, expected):
    """In lines about the end of the run, coding errors, and the model."""
    outputs = outputs_of(SplitServer, play)
    assert any(expected in one for one in [*outputs.lines, *outputs.texts]), outputs.lines


def test_digests_of_versions_have_the_form_that_is_required():
    """A digest that this program sends is one that it accepts."""
    digest = digest_of(np.zeros(3, np.float32))
    assert msg.from_wire(msg.to_wire(msg.Announce(0, digest))) == msg.Announce(0, digest)

"""A peer's hostile text is shown as one printable line, complete, at clients and ps.

The shells are those of real nodes (`text_nodes`). Each test names the text it expects, so that it
fails where none is shown.
"""

import pytest
from deltas import delta_of
from target_parts import ATTACKER, memory_folder
from text_nodes import HOSTILE, SHOWN, Client, ParameterServer, node

from fsl_async.nodes import wire
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey
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


def offers(stream, meta, **changed):
    body = msg.to_wire(meta) | changed
    return lambda made: made.send(frames.DATA, frames.OFFER, 1, stream, 1, 0, body)


# --- a hostile server, and the client's terminal ---


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (sends(msg, msg.Stop(HOSTILE)), SHOWN),
        (sends(msg, msg.Reject("model", HOSTILE)), SHOWN),
        (lambda made: made.refuse("run", HOSTILE), SHOWN),
        (sends(msg, msg.Reject(HOSTILE, "text")), f"Reject.code is not a code: {SHOWN}"),
        (
            sends(msg, msg.Declined(KEY, "stale", ""), key=HOSTILE),
            f"key is not a delta key: {SHOWN}",
        ),
        (
            sends(msg, msg.Accepted(KEY), key=f"{HOSTILE}/1/0/0"),
            f"key is not a delta key: {SHOWN}/1/0/0",
        ),
        (sends(msg, msg.Announce(3, HOSTILE)), f"digest is not a digest: {SHOWN}"),
        (
            offers("full:0", msg.VersionMeta("full", 0), kind=HOSTILE),
            f"kind is not a kind of version: {SHOWN}",
        ),
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
        (
            lambda made: made.greet(made.body() | {"config": {"sync": {"trigger": HOSTILE}}}),
            r"\u001b]0;owned",
        ),
    ],
)
def test_a_server_writes_one_printable_line_at_a_client(play, expected):
    """In what the client prints, in what it journals, and in the error with which it ends."""
    outputs = outputs_of(Client, play)
    assert any(expected in one for one in [*outputs.lines, *outputs.texts]), outputs.lines


# --- a hostile client, and the servers' terminals ---


def offers_delta(**changed):
    """Make a play that offers a delta, with fields that its class would refuse."""
    delta = delta_of(KEY, 8, base_digest=DIGEST, metrics={"loss": 2.5})
    meta = msg.DeltaMeta(delta)
    wire = msg.to_wire(meta)["delta"] | changed
    return offers(f"delta:{KEY.text}", meta, delta=wire)


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (sends(msg, msg.Skip(0, HOSTILE)), SHOWN),
        (
            sends(msg, msg.Holding(0, HOSTILE)),
            f"{ATTACKER} broke the protocol: Holding.digest is not a digest: {SHOWN}",
        ),
        (sends(msg, msg.Fetch(0, HOSTILE)), f"Fetch.digest is not a digest, nor empty: {SHOWN}"),
        (offers_delta(metrics={HOSTILE: 1.0, "a": HOSTILE}), SHOWN),
        (offers_delta(key=HOSTILE), f"DeltaMeta.delta.key is not a delta key: {SHOWN}"),
        (offers_delta(base_digest=HOSTILE), f"base_digest is not a digest, nor empty: {SHOWN}"),
        (
            sends(msg, msg.Attach(DIGEST, [[HOSTILE, [1], 0, False]], [])),
            f"no tensor may be called '{SHOWN}'",
        ),
        (
            sends(msg, msg.Attach(HOSTILE, [["w", [1], 0, False]], [])),
            f"fingerprint is not a digest: {SHOWN}",
        ),
        (lambda made: made.send(frames.BEAT, 0, False, {HOSTILE: 1, "step": HOSTILE}), SHOWN),
        (
            lambda made: made.send(frames.BYE, f"relaunch 7: {HOSTILE}"),
            f"{ATTACKER} is launched again in 12 s, unless it comes back by itself ({SHOWN})",
        ),
        (lambda made: made.greet(wire.Hello("", -1, "", -1).to_wire() | {"run": HOSTILE}), None),
        (lambda made: made.greet({}, name=HOSTILE), None),
        (lambda made: made.greet({}, role=HOSTILE), None),
        (
            lambda made: made.send(
                frames.DATA, frames.OFFER, 1, HOSTILE, 1, 0, msg.to_wire(msg.InitialMeta(DIGEST))
            ),
            "protocol",
        ),
    ],
)
def test_a_client_writes_one_printable_line_at_a_parameter_server(play, expected):
    """In its log, in its journal, and in its line about a relaunch. None: refused before any
    output.
    """
    outputs = outputs_of(ParameterServer, play)
    assert expected is None or any(expected in one for one in [*outputs.lines, *outputs.texts]), (
        outputs.lines
    )

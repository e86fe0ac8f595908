"""The parameter server passes answers of clients that roll out to clients that train."""

import pytest

from fsl_async.config.load import load
from fsl_async.roles.machine import Note, Received, Send
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import ROLL_OUT
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.rollouts import Rollouts

WORDS = b"\1\0\0\0"


class Versions:
    """A stand-in for the machine's deltas."""

    version = 5


def rollout(version=5, site=""):
    return msg.Rollout(version, WORDS, b"{}", [[WORDS, b"\0\0\0\0", 0.5]] * 2, site)


@pytest.fixture
def rollouts():
    config = load(None, ["tune.steps=1", "train.batch=2"])
    members = {name: Member(1, attached=True) for name in "abc"}
    members["r"] = Member(1, attached=True, duty=ROLL_OUT)
    return Rollouts(config, members, Versions())


def test_groups_go_to_clients_that_train_in_turns(rollouts):
    found = [rollouts.pass_on(Received("r", rollout()), 0) for _ in range(3)]
    assert {one.peer for (one,) in found} == {"a", "b", "c"}
    assert all(one == Send(one.peer, rollout(site="r")) for (one,) in found)


@pytest.mark.parametrize(("peer", "version"), [("r", 2), ("r", 6), ("a", 5), ("x", 5)])
def test_old_ones_and_those_of_others_are_dropped(rollouts, peer, version):
    assert rollouts.pass_on(Received(peer, rollout(version)), 0) == []


def test_no_more_of_a_version_are_passed_on_than_can_be_used(rollouts):
    passed = [bool(rollouts.pass_on(Received("r", rollout()), 0)) for _ in range(9)]
    assert passed == [True] * 6 + [False] * 3
    Versions.version = 6
    assert rollouts.pass_on(Received("r", rollout()), 0)
    Versions.version = 5


def test_a_client_that_most_dispute_is_left_out_and_one_liar_cannot_do_that(rollouts):
    def dispute(peer, site="r"):
        return rollouts.disputed(Received(peer, msg.Disputed(site)), 0)

    (note,) = dispute("a")
    assert isinstance(note, Note)
    assert note.text == "a disputes the rewards that r gave its answers"
    assert dispute("a") == dispute("r") == dispute("b", "a") == []
    assert rollouts.pass_on(Received("r", rollout()), 0)
    (note,) = dispute("b")
    assert note.text.endswith("most clients do, so none is passed on any more")
    assert rollouts.pass_on(Received("r", rollout()), 0) == []


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        (b"", [[WORDS, WORDS, 0.0]] * 2),
        (b"\1\0\0", [[WORDS, WORDS, 0.0]] * 2),
        (WORDS, [[WORDS, WORDS, 0.0]]),
        (WORDS, [[WORDS, WORDS * 2, 0.0]] * 2),
        (WORDS, [[WORDS, WORDS, float("nan")]] * 2),
        (WORDS, [[WORDS, WORDS, 1]] * 2),
        (WORDS, [[b"", b"", 0.0]] * 2),
        (WORDS, [[WORDS * 5000, WORDS * 5000, 0.0]] * 2),
    ],
)
def test_nonsense_is_no_rollout(prompt, answers):
    with pytest.raises(ValueError, match=r"answer|reward|bytes"):
        msg.Rollout(1, prompt, b"{}", answers)

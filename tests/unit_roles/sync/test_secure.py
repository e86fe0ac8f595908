"""Secure sums at the parameter server, message by message; whole runs are in unit_secure."""

import pytest

from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.roles.machine import Done, Note, Received, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import MASKS, Delta, DeltaKey, StoredDelta
from fsl_async.roles.sync.ps import Member, Merging, ParameterServerMachine
from fsl_async.roles.sync.ps_state import Phase
from fsl_async.roles.sync.secure import SETUP_S, Stage
from fsl_async.roles.sync.weighting import weighting_named

NAMES = ("a", "b", "c", "d")
DIGEST = "0" * 32


@pytest.fixture
def machine():
    config = with_implied(load(None, ["tune.method=lora", "tune.secure=true", "sync.clients=4"]))
    rules = Merging(3, compares=True)
    made = ParameterServerMachine(config, rules, weighting_named("uniform"), "r")
    for name in NAMES:
        made.members[name] = Member(1, attached=True, version=0)
    made.deltas.advance(0, DIGEST)
    made.rounds.phase = Phase.READY
    return made


def sent(effects, kind):
    found = [one for one in effects if isinstance(one, Send)]
    return {one.peer: one.message for one in found if isinstance(one.message, kind)}


def with_keys(machine, names=NAMES):
    calls = sent(machine.rounds.call(0.0), msg.SecureCall)
    assert calls == dict.fromkeys(NAMES, msg.SecureCall(0, 1))
    effects = []
    for name in names:
        key = msg.SecureKey(0, 1, name.encode() * 32, name.upper().encode() * 32)
        effects += machine.handle(Received(name, key), 1.0)
    return effects


def with_masks(machine):
    roster = sent(with_keys(machine), msg.SecureSet)["a"].roster
    machine.masks = roster.number("r")
    effects = []
    for name in NAMES:
        rows = [[other, f"{name}{other}".encode()] for other in roster.neighbours(name)]
        effects += machine.handle(Received(name, msg.SecureShares(0, 1, rows)), 2.0)
    assert machine.secure.stage is Stage.MASKED
    return sent(effects, msg.SecureShares)


def delta(name, masks=0):
    return Delta(DeltaKey(name, 1, 0, 1), DIGEST, 10, 1, 0, facts={MASKS: masks})


def stored(machine, name, masks=None):
    made = delta(name, machine.masks if masks is None else masks)
    return machine.handle(ev.DeltaStored(name, StoredDelta(made)), 3.0)


def test_each_gets_what_the_others_have_sealed_for_it(machine):
    inboxes = with_masks(machine)
    found = {name: sorted(row[1] for row in one.shares) for name, one in inboxes.items()}
    assert found == {
        name: sorted(f"{other}{name}".encode() for other in NAMES if other != name)
        for name in NAMES
    }


def test_clients_without_keys_are_not_waited_for(machine):
    with_keys(machine, NAMES[:3])
    assert machine.secure.stage is Stage.KEYS
    effects = machine.secure.timer(SETUP_S + 1)
    assert sorted(sent(effects, msg.SecureSet)) == ["a", "b", "c"]
    assert machine.round.missing() == ["a", "b", "c"]


def test_two_keys_make_no_set(machine):
    with_keys(machine, NAMES[:2])
    machine.secure.timer(SETUP_S + 1)
    assert machine.secure.stage is Stage.IDLE
    assert machine.phase is Phase.READY


def test_without_all_shares_there_is_another_attempt(machine):
    with_keys(machine)
    for name in NAMES[:3]:
        rows = [[other, b"x"] for other in NAMES if other != name]
        machine.handle(Received(name, msg.SecureShares(0, 1, rows)), 2.0)
    again = sent(machine.secure.timer(SETUP_S + 2), msg.SecureCall)
    assert again == dict.fromkeys("abc", msg.SecureCall(0, 2))


def test_survivors_are_kept_before_they_are_asked_and_accepted_with_the_version(machine):
    with_masks(machine)
    effects = [effect for name in NAMES for effect in stored(machine, name)]
    (kept,) = [one for one in effects if isinstance(one, do.KeepSum)]
    assert kept.survivors == NAMES
    assert not sent(effects, msg.Unmask | msg.Accepted)
    asked = machine.handle(Done(kept), 4.0)
    assert sorted(sent(asked, msg.Unmask)) == list(NAMES)
    opened = []
    for name in NAMES[:3]:
        rows = [[other, b"s"] for other in (*NAMES, "nobody")]
        opened += machine.handle(Received(name, msg.Unmasked(0, 1, rows)), 5.0)
    (opening,) = [one for one in opened if isinstance(one, do.OpenSum)]
    assert opening.answers.shares["d"] == {"a": b"s", "b": b"s", "c": b"s"}
    assert not machine.handle(Received("d", msg.Unmasked(0, 1, [])), 5.0)
    made = machine.handle(ev.SumOpened(0.5), 6.0)
    (commit,) = [one for one in made if isinstance(one, do.Commit)]
    assert {one.weight for one in commit.merged} == {1.0}
    done = machine.handle(ev.VersionCommitted(1, DIGEST, 10), 7.0)
    assert sent(done, msg.Accepted) == {name: msg.Accepted(delta(name).key) for name in NAMES}


def test_a_site_whose_shares_most_neighbours_refuse_is_left_out_of_a_new_attempt(machine):
    """One complaint is not enough, twice the same neither; deltas of the old masks are void."""
    with_masks(machine)
    stored(machine, "c")
    for _ in range(2):
        assert machine.handle(Received("a", msg.SharesRefused(0, 1, ["d", "nobody"])), 3.0) == []
    assert machine.handle(Received("b", msg.SharesRefused(0, 2, ["d"])), 3.0) == []
    effects = machine.handle(Received("b", msg.SharesRefused(0, 1, ["d"])), 3.0)
    assert sent(effects, msg.SecureCall) == dict.fromkeys("ab", msg.SecureCall(0, 2))
    assert sent(effects, msg.Declined)["c"].code == "void"
    (note,) = [one for one in effects if isinstance(one, Note)]
    assert "the shares that d sealed" in note.text


@pytest.mark.parametrize("masks", [0, 2])
def test_a_delta_under_other_masks_is_declined_as_void(machine, masks):
    with_masks(machine)
    effects = stored(machine, "a", masks=masks)
    assert sent(effects, msg.Declined)["a"].code == "void"
    assert not machine.deltas.pending


def test_one_that_comes_while_the_sum_is_opened_is_declined(machine):
    with_masks(machine)
    for name in NAMES[:3]:
        stored(machine, name)
    machine.secure.close(4.0)
    assert machine.secure.stage is Stage.FIXING
    effects = stored(machine, "d")
    assert sent(effects, msg.Declined)["d"].code == "void"
    assert sorted(key.client for key in machine.deltas.pending) == ["a", "b", "c"]


@pytest.mark.parametrize("problem", ["timer", "opening", "few"])
def test_a_void_round_declines_all_and_closes(machine, problem):
    with_masks(machine)
    names = NAMES[: 2 if problem == "few" else 3]
    for name in names:
        stored(machine, name)
    effects = machine.secure.close(4.0)
    if problem != "few":
        (kept,) = effects
        machine.handle(Done(kept), 4.0)
        if problem == "opening":
            machine.secure.stage = Stage.SUMMING
            (kept,) = machine.handle(ev.SumOpened(0.0, "the sum cannot be opened"), 5.0)
        else:
            (kept,) = machine.secure.timer(100.0)
        assert kept == do.KeepSum(machine.secure.roster, ()), "it is durable before it is told"
        effects = machine.handle(Done(kept), 101.0)
    declined = sent(effects, msg.Declined)
    assert {one.code for one in declined.values()} == {"void"}
    assert tuple(sorted(declined)) == names
    assert not machine.deltas.pending
    assert machine.phase is Phase.READY
    assert machine.secure.stage is Stage.IDLE

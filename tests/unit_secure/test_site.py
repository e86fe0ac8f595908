"""What a site refuses, and what a hostile server learns in random histories: no single delta."""

# ruff: noqa: D102 - the world has a server's view

import random

import numpy as np
import pytest
from secure_audit import Audit, audited

from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.roster import Answers, Roster
from fsl_async.secure import lattice, masks
from fsl_async.secure.opening import Opening
from fsl_async.secure.site import RefusedError

RUN = "notes"


class World:
    """Sites, and a server that holds every message they send and chooses what each receives."""

    def __init__(self, seed, count=None):
        self.chance = random.Random(seed)
        self.names = [f"s{n}" for n in range(count or self.chance.randint(3, 6))]
        self.secrets = {name: self.chance.randbytes(32) for name in self.names}
        self.publics = {name: masks.public_of(one) for name, one in self.secrets.items()}
        self.audit = Audit()
        self.own = self.chance.randbytes(32)
        """The server's key, which it may put in the place of a site's."""
        self.sites = {}
        for name in self.names:
            self.launch(name)
        self.keys, self.sealed, self.frames, self.shares = {}, {}, {}, {}
        self.rosters = []
        self.refused = 0

    def launch(self, name):
        given = (name, RUN, self.secrets[name], self.known, self.chance.randbytes)
        self.sites[name] = audited(self.audit, *given)

    def known(self, found):
        if any(self.publics.get(name) != key for name, key in found.items()):
            raise RefusedError("another key")

    def tell(self, name, message):
        """Return a site's answer, None where it gives none."""
        try:
            return self.sites[name].handle(message)
        except RefusedError:
            self.refused += 1
            return None

    # --- an honest server ---

    def set_up(self, names, number, attempt):
        keys = {name: self.tell(name, msg.SecureCall(number, attempt)) for name in names}
        members = [[name, key.site, key.key] for name, key in keys.items()]
        roster = Roster(number, attempt, 0.01, 6, members)
        sealed = {name: self.tell(name, msg.SecureSet(roster)) for name in names}
        for name in names:
            given = [[one, dict(sealed[one].shares)[name]] for one in roster.neighbours(name)]
            self.tell(name, msg.SecureShares(number, attempt, given))
        return roster

    def mask(self, name, number, numbers):
        taken = self.sites[name].take_masks(number)
        return None if taken is None else taken.frame(numbers, 0)

    def open(self, roster, survivors, frames):
        shares = {}
        for name in survivors:
            question = msg.Unmask(roster.round, roster.attempt, survivors)
            answer = self.tell(name, question)
            for other, share in [] if answer is None else answer.shares:
                shares.setdefault(other, {})[name] = share
        return Opening(Answers(roster, tuple(survivors), shares), RUN).mean(frames, 0, 40)


def numbers_of(name, number):
    rng = np.random.default_rng([ord(name[1]), number])
    return rng.integers(-31, 32, 40, dtype=np.int32)


def honest_round(world, number):
    """A round in which sites may be lost before and after masking, or asked again."""
    chance = world.chance
    roster = world.set_up(world.names, number, 1)
    frames = {}
    for name in world.names:
        if chance.random() < 0.15:
            world.launch(name)  # killed before it masked
            continue
        frame = world.mask(name, number, numbers_of(name, number))
        if frame is not None and chance.random() > 0.1:  # else it comes too late
            frames[name] = frame
    survivors = sorted(frames)
    for name in survivors:
        if chance.random() < 0.05:
            world.launch(name)  # killed before it was asked
    if roster.objection(survivors):
        return
    try:
        found = world.open(roster, survivors, frames)
        again = world.open(roster, survivors, frames)  # a server that was started again
    except ValueError:
        return  # too few answers
    wanted = sum(numbers_of(name, number).astype(int) for name in survivors)
    assert np.array_equal(found, lattice.to_values(wanted, 0.01 / len(survivors)))
    assert np.array_equal(found, again)
    world.completed = getattr(world, "completed", 0) + 1


def hostile_step(world):
    """One message of a server that tries everything."""
    chance = world.chance
    name, number, attempt = chance.choice(world.names), int(chance.random() < 0.1), 1
    if chance.random() < 0.1:
        attempt = 2
    weights = {"call": 2, "set": 4, "shares": 30, "mask": 30, "unmask": 40, "launch": 5}
    (what,) = chance.choices(list(weights), list(weights.values()))
    if what == "call":
        answer = world.tell(name, msg.SecureCall(number, attempt))
        world.keys[name, number, attempt] = answer
    elif what == "set":
        found = {one: key for (one, *at), key in world.keys.items() if at == [number, attempt]}
        members = [[one, key.site, key.key] for one, key in found.items()]
        chance.shuffle(members)
        members = members[: chance.randint(3, 6)]
        for member in members:
            if chance.random() < 0.1:  # keys of its own
                member[chance.randint(1, 2)] = masks.public_of(world.own)
        if len(members) >= 3 and chance.random() < 0.9:
            world.rosters.append(Roster(number, attempt, 0.01, 6, members))
        if world.rosters:
            answer = world.tell(name, msg.SecureSet(chance.choice(world.rosters[-3:])))
            if answer is not None:
                for other, text in answer.shares:
                    world.sealed.setdefault((other, answer.round, answer.attempt), {})[name] = text
    elif what == "shares":
        found = world.sealed.get((name, number, attempt), {})
        world.tell(name, msg.SecureShares(number, attempt, [[*one] for one in found.items()]))
    elif what == "mask":
        world.mask(name, number, numbers_of(name, number))
    elif what == "unmask":
        survivors = chance.sample(world.names, chance.randint(1, len(world.names)))
        if chance.random() < 0.5:
            survivors = world.names[: chance.choice([2, 3, 6])]
        world.tell(name, msg.Unmask(number, attempt, survivors))
    elif chance.random() < 0.1:
        world.launch(name)


def hostile_history(seed):
    """An agreed set, then anything."""
    world = World(seed)
    if world.chance.random() < 0.7:
        for name in world.names:
            world.keys[name, 0, 1] = world.tell(name, msg.SecureCall(0, 1))
        members = [[name, world.publics[name], world.keys[name, 0, 1].key] for name in world.names]
        world.rosters.append(roster := Roster(0, 1, 0.01, 6, members))
        for name in world.names:
            for other, text in world.tell(name, msg.SecureSet(roster)).shares:
                world.sealed.setdefault((other, 0, 1), {})[name] = text
    for _ in range(60):
        hostile_step(world)
    return world


def check(seeds):
    opened = completed = refused = 0
    for seed in seeds:
        world = hostile_history(seed)
        assert world.audit.problems() == [], seed
        opened, refused = opened + world.audit.opened, refused + world.refused
        world = World(seed)
        for number in range(2):
            honest_round(world, number)
        assert world.audit.problems() == [], seed
        completed += getattr(world, "completed", 0)
    assert opened > len(seeds) / 50
    assert refused > 10 * len(seeds)
    assert completed > 0.4 * len(seeds)


def test_no_history_reveals_a_single_delta():
    check(range(150))


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1000, 11_000, 1000))
def test_none_of_ten_thousand_histories_reveals_a_single_delta(first):
    check(range(first, first + 1000))


# --- one rule each ---


def ready(count=4):
    world = World(1, count)
    return world, world.set_up(world.names, 0, 1)


def refused(world, name, message):
    with pytest.raises(RefusedError) as found:
        world.sites[name].handle(message)
    world.answer = found.value.answer
    assert "\n" not in str(found.value)
    return str(found.value)


def test_one_set_of_survivors_is_answered():
    world, _ = ready()
    for name in world.names:
        world.mask(name, 0, numbers_of(name, 0))
    first = world.sites["s0"].handle(msg.Unmask(0, 1, world.names))
    assert world.sites["s0"].handle(msg.Unmask(0, 1, world.names[::-1])) == first
    assert "two different sums" in refused(world, "s0", msg.Unmask(0, 1, world.names[:3]))


def test_a_share_of_one_secret_of_each_site_is_given():
    world, _ = ready()
    for name in world.names:
        world.mask(name, 0, numbers_of(name, 0))
    answer = world.sites["s0"].handle(msg.Unmask(0, 1, world.names[:3]))
    held = world.sites["s0"]._attempt.held
    kinds = {name: held[name].index(share) for name, share in answer.shares}
    assert kinds == {"s0": 1, "s1": 1, "s2": 1, "s3": 0}


@pytest.mark.parametrize(("survivors", "why"), [
    (["s0", "s1"], "a sum of 2 sites"),
    (["s1", "s2", "s3"], "not of us"),
    (["s0", "s1", "s9"], "not all of these sites"),
])  # fmt: skip
def test_sums_that_show_too_much_are_not_opened(survivors, why):
    world, _ = ready()
    world.mask("s0", 0, numbers_of("s0", 0))
    assert why in refused(world, "s0", msg.Unmask(0, 1, survivors))


def test_a_sum_of_sites_that_do_not_mask_with_each_other_is_not_opened():
    members = [[f"s{n}", bytes([n]) * 32, bytes([n]) * 32] for n in range(24)]
    roster = Roster(0, 1, 1.0, 6, members)
    ring = roster.ring
    assert roster.objection(ring) == roster.objection(ring[:12]) == ""
    assert "no group" in roster.objection([*ring[:5], *ring[12:16]])


def test_a_site_that_sent_nothing_opens_nothing():
    world, _ = ready()
    assert "without this site's part" in refused(world, "s0", msg.Unmask(0, 1, world.names))


def test_a_replaced_key_is_found_by_the_site_that_it_is_told_to():
    world = World(2, 4)
    keys = {name: world.tell(name, msg.SecureCall(0, 1)) for name in world.names}
    members = [[name, key.site, key.key] for name, key in keys.items()]
    told = [*members[:3], ["s3", members[3][1], masks.public_of(world.own)]]
    sealed = {}
    for name in world.names:
        roster = Roster(0, 1, 0.01, 6, told if name == "s0" else members)
        sealed[name] = dict(world.tell(name, msg.SecureSet(roster)).shares)
    given = [[name, sealed[name]["s0"]] for name in world.names[1:]]
    text = refused(world, "s0", msg.SecureShares(0, 1, given))
    assert "s1, s2, s3" in text
    assert "replaced a key" in text
    assert world.answer == msg.SharesRefused(0, 1, world.names[1:])
    assert world.mask("s0", 0, numbers_of("s0", 0)) is None
    told[3][1] = masks.public_of(world.own)
    world.launch("s0")
    world.keys = world.tell("s0", msg.SecureCall(0, 1))
    told[0][2] = world.keys.key
    assert "another key" in refused(world, "s0", msg.SecureSet(Roster(0, 1, 0.01, 6, told)))


def test_a_second_set_and_a_set_without_the_own_key_are_refused():
    world, roster = ready()
    other = Roster(0, 1, 0.02, 6, roster.members)
    assert "second set" in refused(world, "s0", msg.SecureSet(other))
    world.tell("s1", msg.SecureCall(0, 2))
    again = Roster(0, 2, 0.01, 6, roster.members)
    assert "own keys" in refused(world, "s1", msg.SecureSet(again))
    twice = [*roster.members[:3], ["s9", roster.members[0][1], roster.members[0][2]]]
    world.tell("s0", msg.SecureCall(0, 3))
    key = world.tell("s0", msg.SecureCall(0, 3)).key
    twice[0] = ["s0", roster.members[0][1], key]
    assert "two names" in refused(world, "s0", msg.SecureSet(Roster(0, 3, 0.01, 6, twice)))


def test_a_new_attempt_forgets_the_keys_before():
    world, _ = ready()
    world.mask("s0", 0, numbers_of("s0", 0))
    world.tell("s0", msg.SecureCall(0, 2))
    assert "not this site's present one" in refused(world, "s0", msg.Unmask(0, 1, world.names))
    assert world.sites["s0"].expects(0)
    assert world.mask("s0", 0, numbers_of("s0", 0)) is None


def test_wrong_shares_open_nothing():
    world, roster = ready()
    frames = {name: world.mask(name, 0, numbers_of(name, 0)) for name in world.names}
    shares = {}
    for name in world.names[:3]:
        for other, share in world.tell(name, msg.Unmask(0, 1, world.names[:3])).shares:
            shares.setdefault(other, {})[name] = share
    frames.pop("s3")
    good = Answers(roster, tuple(world.names[:3]), shares)
    Opening(good, RUN).mean(frames, 0, 40)
    for name, why in (("s0", "not of one secret"), ("s3", "not of one secret")):
        holder = next(iter(shares[name]))
        wrong = {**shares, name: {**shares[name], holder: bytes(65) + b"x"}}
        with pytest.raises(ValueError, match=why):
            Opening(Answers(roster, good.survivors, wrong), RUN)
    with pytest.raises(ValueError, match="shares of s1 are here"):
        Opening(Answers(roster, good.survivors, {**shares, "s1": {}}), RUN)
    frames["s0"] = lattice.pack(np.zeros(40, "<u2"), 12)
    with pytest.raises(ValueError, match="words of 12 bits"):
        Opening(good, RUN).mean(frames, 0, 40)

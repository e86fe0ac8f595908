"""The machine of a gang: its transitions one by one, and its rules in random histories."""

import random

import pytest
from machines import of

from fsl_async.roles import gang
from fsl_async.roles import gang_messages as msg
from fsl_async.roles.machine import Received, TimerFired
from fsl_async.roles.sync.progress import RunPosition

VALUES = 10
CONTEXT = b"context"
PRINT = "0" * 32


def formed(machine, world=2, generation=0, first_peer=1):
    """Have all ranks come and attach; returns their connections by rank."""
    peers = [first_peer + rank for rank in range(world)]
    effects = []
    for rank, peer in enumerate(peers):
        effects += machine.handle(Received(peer, msg.Hello(rank, world, generation)), 0.0)
    for peer in peers:
        effects += machine.handle(Received(peer, msg.Shape(VALUES)), 0.0)
    assert of(effects, gang.MakeSlots) == [gang.MakeSlots(VALUES)]
    share = -(-VALUES // world)
    for rank, peer in enumerate(peers):
        part = (min(VALUES, rank * share), min(VALUES, (rank + 1) * share))
        ranges = (part,) if part[0] < part[1] else ()
        effects += machine.handle(gang.RankAttached(peer, PRINT, ranges), 0.0)
    assert of(effects, gang.GangAttached) == [gang.GangAttached(PRINT, world)]
    return peers


@pytest.fixture
def machine():
    """A machine whose run has welcomed it."""
    made = gang.GangMachine()
    made.handle(gang.ContextKnown(CONTEXT), 0.0)
    return made


def test_directives_go_to_rank_0_last_and_are_numbered(machine):
    """Rank 0 tells the others in a collective what it has: they have it already."""
    peers = formed(machine, 3)
    (direct,) = machine.handle(gang.Asked(msg.Snapshot(0, 1, 0)), 0.0)
    assert direct.peers == tuple(reversed(peers))
    (later,) = machine.handle(gang.Told(msg.Resume(0)), 0.0)
    assert later.directive.number == direct.directive.number + 1


def test_an_order_is_answered_once_when_all_are_done(machine):
    """Tokens are added up, metrics are means; a rank that says it twice counts once."""
    first, second = formed(machine)
    (direct,) = machine.handle(gang.Asked(msg.Snapshot(0, 1, 0)), 0.0)
    number = direct.directive.number
    one = msg.Done(number, 8, 2, metrics={"loss": 1.0, "nonfinite": 1.0}, facts={"rank": 4.0})
    assert machine.handle(Received(first, one), 0.0) == []
    assert machine.handle(Received(first, one), 0.0) == []
    other = msg.Done(number, 4, 2, finite=False, metrics={"loss": 2.0})
    (answer,) = machine.handle(Received(second, other), 0.0)
    assert answer.done == msg.Done(
        number, 12, 2, finite=False, metrics={"loss": 1.5, "nonfinite": 1.0}, facts={"rank": 4.0}
    )
    assert machine.handle(Received(second, other), 0.0) == []
    assert machine.gang.is_attached
    assert not machine.gang.order


def test_unequal_steps_are_an_error(machine):
    """A rank that makes more steps than others would answer with another state."""
    first, second = formed(machine)
    (direct,) = machine.handle(gang.Asked(msg.Snapshot(0, 1, 0)), 0.0)
    machine.handle(Received(first, msg.Done(direct.directive.number, 8, 2)), 0.0)
    effects = machine.handle(Received(second, msg.Done(direct.directive.number, 8, 3)), 0.0)
    assert [type(one) for one in effects] == [gang.Unanswered, gang.Failed]
    assert "2, 3" in effects[1].text


@pytest.mark.parametrize(
    ("ranges", "place"),
    [
        ([(0, 10)], None),
        ([(4, 10), (0, 4)], None),
        ([(0, 4), (5, 10)], 4),
        ([(0, 6), (4, 10)], 4),
        ([(0, 4)], 4),
        ([(1, 10)], 0),
        ([], 0),
        ([(0, 10), (10, 12)], 10),
    ],
)
def test_ranges_must_be_all_values_once(machine, ranges, place):
    """A value that two ranks write is torn; one that none writes is not of this model."""
    assert gang.uncovered(ranges, VALUES) == place
    machine.handle(Received(1, msg.Hello(0, 1, 0)), 0.0)
    machine.handle(Received(1, msg.Shape(VALUES)), 0.0)
    (effect,) = machine.handle(gang.RankAttached(1, PRINT, tuple(ranges)), 0.0)
    assert isinstance(effect, gang.GangAttached if place is None else gang.Failed)


def test_ranks_with_other_models_are_refused(machine):
    """Stages of a pipeline have different sizes, or different names."""
    for rank in range(2):
        machine.handle(Received(rank, msg.Hello(rank, 2, 0)), 0.0)
    machine.handle(Received(0, msg.Shape(5)), 0.0)
    (failed,) = machine.handle(Received(1, msg.Shape(6)), 0.0)
    assert "5, 6" in failed.text
    machine = gang.GangMachine()
    for rank in range(2):
        machine.handle(Received(rank, msg.Hello(rank, 2, 0)), 0.0)
    for rank in range(2):
        machine.handle(Received(rank, msg.Shape(VALUES)), 0.0)
    machine.handle(gang.RankAttached(0, PRINT, ((0, 10),)), 0.0)
    (failed,) = machine.handle(gang.RankAttached(1, "1" * 32, ()), 0.0)
    assert "pipeline" in failed.text


def test_a_lost_rank_ends_its_gang_and_its_order(machine):
    """The others get an end of their connection; the next gang gets what holds for good."""
    first, second = formed(machine)
    position = msg.Position(0, RunPosition(tokens=7))
    machine.handle(gang.Told(position), 0.0)
    machine.handle(gang.Told(msg.Pace(0, 3)), 0.0)
    machine.handle(gang.Told(msg.Pace(0, 5)), 0.0)
    machine.handle(gang.Asked(msg.Snapshot(0, 1, 0)), 0.0)
    effects = machine.handle(gang.RankLost(second, "gone"), 1.0)
    assert [type(one) for one in effects] == [gang.Drop, gang.Unanswered, gang.GangLost]
    assert effects[0].peer == first
    assert machine.handle(gang.RankLost(first, "gone"), 1.0) == []
    (unanswered,) = machine.handle(gang.Asked(msg.Snapshot(0, 2, 0)), 1.0)
    assert isinstance(unanswered, gang.Unanswered)
    machine.handle(Received(7, msg.Hello(0, 2, 1)), 2.0)
    effects = machine.handle(Received(8, msg.Hello(1, 2, 1)), 2.0)
    told = [one.directive for one in effects]
    assert told == [msg.Welcome(1, CONTEXT), msg.Position(2, position.position), msg.Pace(3, 5)]


def test_a_later_generation_replaces_a_gang(machine):
    """Torchrun may start ranks again before the node has seen all connections end."""
    peers = formed(machine)
    effects = machine.handle(Received(9, msg.Hello(0, 2, 1)), 0.0)
    assert [one.peer for one in of(effects, gang.Drop)] == list(reversed(peers))
    (drop,) = machine.handle(Received(10, msg.Hello(1, 2, 0)), 0.0)
    assert drop.peer == 10
    (drop,) = machine.handle(Received(11, msg.Hello(0, 2, 1)), 0.0)
    assert drop.peer == 11
    (drop,) = machine.handle(Received(12, msg.Hello(1, 3, 1)), 0.0)
    assert "of the 2 ranks" in drop.reason


def test_the_base_is_read_beside_an_order(machine):
    """Ranks in fed.at_version have not come to the order yet, which waits for them."""
    peers = formed(machine)
    machine.handle(gang.Asked(msg.Snapshot(0, 1, 0)), 0.0)
    assert machine.handle(Received(peers[0], msg.BaseWanted()), 0.0) == []
    assert machine.handle(Received(peers[1], msg.BaseWanted()), 0.0) == [gang.ReadBase()]
    (direct,) = machine.handle(gang.Told(msg.Base(0, 3, 0)), 0.0)
    done = msg.Done(direct.directive.number)
    assert machine.handle(Received(peers[0], done), 0.0) == []
    assert machine.handle(Received(peers[1], done), 0.0) == [gang.BaseRead()]


def test_the_end(machine):
    """Training ends when it has in all ranks; an error for good ends it at once."""
    first, second = formed(machine)
    assert machine.handle(Received(first, msg.Ended("")), 0.0) == []
    assert machine.handle(Received(second, msg.Ended("")), 0.0) == [gang.AllEnded()]
    assert machine.handle(Received(second, msg.Ended("")), 0.0) == []
    assert machine.handle(Received(second, msg.Ended("no", 2)), 0.0) == [gang.Failed("no", 2)]


@pytest.mark.parametrize(
    ("message", "did"),
    [(msg.Ended(""), "have returned"), (msg.BaseWanted(), "wait in fed.at_version")],
)
def test_ranks_that_others_wait_for_are_named(machine, message, did):
    """Else nothing is seen until their collectives time out, after half an hour."""
    peers = formed(machine, world=3)
    assert machine.handle(Received(peers[1], message), 5.0) == []
    assert machine.next_deadline() == 65.0
    (note,) = machine.handle(TimerFired(), 65.0)
    assert f"ranks 1 {did} for 60 s, and ranks 0, 2" in note.text
    for peer in (peers[0], peers[2]):
        effects = machine.handle(Received(peer, message), 66.0)
    assert type(effects[-1]) in {gang.AllEnded, gang.ReadBase}
    assert machine.next_deadline() is None


def test_without_ranks_the_node_gives_up():
    """At first, and after each loss of a gang."""
    machine = gang.GangMachine(wait_s=5.0)
    assert machine.next_deadline() == 5.0
    machine.handle(gang.ContextKnown(CONTEXT), 0.0)
    peers = formed(machine)
    assert machine.next_deadline() is None
    machine.handle(gang.RankLost(peers[0], "gone"), 7.0)
    assert machine.handle(TimerFired(), 11.0) == []
    (gave_up,) = machine.handle(TimerFired(), 12.0)
    assert isinstance(gave_up, gang.GaveUp)


def test_a_refusal_comes_before_the_welcome():
    """A run that refuses this client ends ranks that wait for its welcome."""
    machine = gang.GangMachine()
    machine.handle(Received(1, msg.Hello(0, 1, 0)), 0.0)
    (direct,) = machine.handle(gang.Told(msg.Refuse(0, "full", "no")), 0.0)
    assert direct.directive == msg.Refuse(1, "full", "no")


class World:
    """Ranks with steps, tokens and clocks of their own, that may be killed at any moment."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.machine = gang.GangMachine()
        self.machine.handle(gang.ContextKnown(CONTEXT), 0.0)
        self.world = self.chance.randint(1, 4)
        self.generation = -1
        self.next_peer = 0
        self.inbox = {}  # connection -> directives that its rank has not seen
        self.ranks = {}  # connection -> (steps, unsent steps) of its rank
        self.numbers = {}  # connection -> number of the last directive
        self.in_flight = None
        self.answers, self.copied = [], {}
        self.trained, self.counted = 0, 0
        self.sequence = 0

    def feed(self, event):
        """Give the machine an event, and check its effects."""
        for effect in self.machine.handle(event, 0.0):
            match effect:
                case gang.Direct(peers, directive):
                    assert set(peers) == set(self.ranks)
                    for peer in peers:
                        assert directive.number == self.numbers[peer] + 1
                        self.numbers[peer] += 1
                        self.inbox[peer].append(directive)
                case gang.Answered(done):
                    assert self.in_flight is not None
                    steps = self.copied.pop(self.in_flight)
                    assert len(steps) == self.world
                    assert len(set(steps)) == 1  # no snapshot of two steps
                    assert done.tokens == sum(steps)
                    self.counted += done.tokens
                    self.in_flight = None
                case gang.Unanswered():
                    if self.in_flight is not None:
                        self.copied.pop(self.in_flight, None)
                    self.in_flight = None
                case gang.GangLost():
                    self.ranks.clear()
                case gang.Drop(peer):
                    self.inbox.pop(peer, None)
                case gang.Failed(text):
                    raise AssertionError(text)

    def start(self):
        """All ranks come, in any order."""
        self.generation += 1
        peers = []
        for rank in self.chance.sample(range(self.world), self.world):
            self.next_peer += 1
            peer = self.next_peer
            self.inbox[peer], self.numbers[peer] = [], 0
            self.ranks[peer] = 0
            peers.append((rank, peer))
            self.feed(Received(peer, msg.Hello(rank, self.world, self.generation)))
            if self.chance.random() < 0.05:
                self.kill()
                return
        for _, peer in peers:
            self.feed(Received(peer, msg.Shape(VALUES)))
        for rank, peer in peers:
            ranges = ((0, VALUES),) if rank == 0 else ()
            self.feed(gang.RankAttached(peer, PRINT, ranges))

    def kill(self):
        """SIGKILL one rank."""
        if self.ranks:
            peer = self.chance.choice(list(self.ranks))
            self.inbox.pop(peer, None)
            self.feed(gang.RankLost(peer, "killed"))

    def ask(self):
        """Ask for a delta, if none is in flight."""
        if self.in_flight is None:
            self.sequence += 1
            self.in_flight, self.copied[self.sequence] = self.sequence, []
            self.feed(gang.Asked(msg.Snapshot(0, self.sequence, 0)))

    def step(self):
        """All ranks make a step, and then what each of them was told, in any order of ranks."""
        if not self.machine.has_gang:
            return
        for peer in self.ranks:
            self.ranks[peer] += 1
        self.trained += self.world
        seen = min(len(self.inbox[peer]) for peer in self.ranks)
        for peer in self.chance.sample(list(self.ranks), len(self.ranks)):
            for _ in range(seen):
                if peer not in self.ranks:
                    return
                directive = self.inbox[peer].pop(0)
                if isinstance(directive, msg.Snapshot):
                    steps, self.ranks[peer] = self.ranks[peer], 0
                    self.copied[directive.sequence].append(steps)
                    done = msg.Done(directive.number, steps, steps)
                    self.feed(Received(peer, done))
                    if self.chance.random() < 0.1:
                        self.kill()
                        return


@pytest.mark.parametrize("seed", range(40))
def test_the_rules_hold_in_any_history(seed):
    """No snapshot of two steps, one order in flight, each answered once, tokens = sum of ranks."""
    world = World(seed)
    for _ in range(400):
        if not world.ranks:
            world.start()
        world.chance.choice([world.step, world.step, world.ask, world.ask])()
        if world.chance.random() < 0.02:
            world.kill()
        gang_now = world.machine.gang
        order = 0 if gang_now is None else gang_now.order
        assert bool(order) == (world.in_flight is not None)
    assert 0 < world.counted <= world.trained
    assert world.generation > 0

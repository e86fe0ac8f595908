"""The relay's machine: who gets a line, what is dropped, and when it may end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.roles.machine import DrainAsked, Finish, Note, TimerFired
from fsl_async.roles.relay import effects as relay
from fsl_async.roles.relay import events as evr
from fsl_async.roles.relay.connection_limits import ConnectionRules
from fsl_async.roles.relay.relay import DoorRules, LineStage, RelayMachine, RelayRules, amount

SEALED = DoorRules(name="ps", sealed=True)
OPEN = DoorRules(name="split", sealed=False)


class Relay:
    """A machine with a clock, and with a switchboard that ends what is dropped."""

    def __init__(self, newcomers=None, **rules):
        self.now = 0.0
        self.machine = RelayMachine(
            RelayRules(doors=(SEALED, OPEN), newcomers=ConnectionRules(**newcomers or {}), **rules)
        )
        self.dropped = {}
        self.notes = []
        self.finished = []

    def feed(self, event):
        """Feed one event, and what dropping ends in; returns the other effects."""
        left = []
        for effect in self.machine.handle(event, self.now):
            if isinstance(effect, relay.DropLine):
                self.dropped[effect.line] = effect.reason
                left += self.feed(evr.LineEnded(effect.line, effect.reason, 0, 0))
            elif isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, Finish):
                self.finished.append(effect)
            else:
                left.append(effect)
        return left

    def until(self, when):
        """Let time pass; returns what the timers brought."""
        effects = []
        for _ in range(10_000):
            deadline = self.machine.next_deadline()
            if deadline is None or deadline > when:
                break
            self.now = max(self.now, deadline)
            effects += self.feed(TimerFired())
        else:
            raise AssertionError("its timers never end")
        self.now = when
        return effects

    def accept(self, line, source="a", door=0):
        """Somebody connects."""
        return self.feed(evr.LineAccepted(line, door, source))

    def open(self, line, source="a", door=0):
        """A line stands."""
        self.accept(line, source, door)
        self.feed(evr.LineSigned(line))
        self.feed(evr.LineDialled(line))
        self.feed(evr.LineAnswered(line))
        self.feed(evr.LineGreeted(line, "CURVE"))

    def look(self, *states):
        """What each line has carried, up and down; what is held in the process; what the ends have not acknowledged."""
        found = []
        for line, up, down, held_up, held_down, *left in states:
            left_up, left_down = left or (0, 0)
            taken = (up - left_up, down - left_down)
            found.append(evr.LineState(line, up, down, *taken, held_up, held_down))
        return self.feed(evr.LinesLooked(tuple(found)))


def test_the_twin_is_dialled_when_somebody_speaks_zeromq():
    """Not before: a port scanner costs the server nothing."""
    one = Relay()
    assert one.accept(1) == [relay.ReadGreeting(1)]
    assert one.feed(evr.LineSigned(1)) == [relay.DialTwin(1)]
    assert one.feed(evr.LineDialled(1)) == [relay.Carry(1)]
    assert one.feed(evr.LineAnswered(1)) == []
    assert one.feed(evr.LineGreeted(1, "CURVE")) == []
    assert one.machine.lines[1].stage is LineStage.OPEN
    one.until(60.0)
    assert not one.dropped


def test_what_is_no_zeromq_is_dropped():
    """Whether that shows in the first ten bytes or later."""
    one = Relay()
    one.accept(1)
    one.feed(evr.LineGreeted(1, ""))
    one.accept(2)
    one.feed(evr.LineSigned(2))
    one.feed(evr.LineDialled(2))
    one.feed(evr.LineGreeted(2, ""))
    assert set(one.dropped) == {1, 2}
    assert one.machine.totals.dropped == {"no ZeroMQ": 2}


@pytest.mark.parametrize("after", ["accept", "dial"])
def test_who_says_too_little_is_dropped_in_time(after):
    """Slow-loris: neither silence nor a greeting that never ends holds a line for longer than `greeting_s`."""
    one = Relay()
    one.accept(1)
    if after == "dial":
        one.until(9.0)
        one.feed(evr.LineSigned(1))
        one.feed(evr.LineDialled(1))
        one.until(18.9)
        assert not one.dropped
    one.until(10.0 if after == "accept" else 19.0)
    assert one.dropped == {1: "no greeting within 10 s"}
    assert not one.machine.lines


def test_a_sealed_door_lets_only_curve_pass():
    """With a key in the server's address nothing readable may pass; without one that is the operator's choice."""
    one = Relay()
    for line, door in ((1, 0), (2, 0), (3, 1)):
        one.accept(line, door=door)
        one.feed(evr.LineSigned(line))
        one.feed(evr.LineDialled(line))
        one.feed(evr.LineGreeted(line, "NULL"))
    assert set(one.dropped) == {1, 2}
    assert [note.level for note in one.notes] == ["warning"], "said once, not for each"
    assert "?key=" in one.notes[0].text
    one.until(61.0)
    one.accept(4)
    one.feed(evr.LineSigned(4))
    one.feed(evr.LineDialled(4))
    one.feed(evr.LineGreeted(4, "PLAIN"))
    assert [note.level for note in one.notes] == ["warning", "info", "warning"], (
        "after the status line again"
    )
    assert "3 unencrypted" not in one.notes[1].text
    assert "2 unencrypted" in one.notes[1].text


def test_a_server_that_is_away_is_dialled_again_while_a_client_waits():
    """With growing waits, said once; and the client goes when its own patience with a greeting would end."""
    one = Relay()
    one.accept(1)
    one.feed(evr.LineSigned(1))
    dialled = []
    for _ in range(20):
        one.feed(evr.DialFailed(1, "connection refused"))
        if one.dropped:
            break
        before = one.now
        assert one.until(one.machine.next_deadline()) == [relay.DialTwin(1)]
        dialled.append(round(one.now - before, 3))
    assert dialled[:4] == [0.25, 0.5, 1.0, 2.0]
    assert max(dialled) == 2.0
    assert one.dropped == {1: "no server: connection refused"}
    assert one.now <= 9.0
    assert len(one.notes) == 1
    one.open(2)
    assert one.notes[1].text == "ps is reached again"


def test_who_gets_no_place_is_dropped_and_counted():
    """`newcomers` says who, and why; a line that stands for long enough is no stranger's any more, and one that ends is none of theirs."""
    one = Relay({"lines": 4, "strangers": 2, "dials_burst": 5})
    one.open(1)
    one.open(2)
    one.accept(3)
    assert one.dropped == {3: "2 new connections already"}
    one.until(15.0)
    one.open(4)
    one.open(5)
    one.accept(6)
    assert one.dropped[6] == "4 connections already"
    one.feed(evr.LineEnded(1, "the client closed it", 1, 2))
    one.feed(evr.LineEnded(5, "the client closed it", 1, 2))
    one.open(7, "b")
    assert set(one.machine.lines) == {2, 4, 7}
    assert one.machine.totals.dropped == {"full": 2}


def test_a_known_line_that_ends_makes_no_place_for_a_stranger():
    """It had none of theirs."""
    one = Relay({"strangers": 2})
    one.open(1)
    one.until(15.0)
    one.feed(evr.LineEnded(1, "the client closed it", 0, 0))
    one.open(2)
    one.open(3)
    one.accept(4)
    assert one.dropped == {4: "2 new connections already"}


def test_who_connects_too_fast_gets_no_twin():
    """The server counts what a relay dials as one address's."""
    one = Relay({"dials_burst": 2, "dials_per_s": 1})
    for line in (1, 2, 3):
        one.accept(line)
    assert one.feed(evr.LineSigned(1)) == [relay.DialTwin(1)]
    assert one.feed(evr.LineSigned(2)) == [relay.DialTwin(2)]
    assert one.feed(evr.LineSigned(3)) == []
    assert one.dropped == {3: "a connects more than 1 times a second"}
    assert one.machine.totals.dropped == {"too fast": 1}
    one.accept(4, "b")
    assert one.feed(evr.LineSigned(4)) == [relay.DialTwin(4)]


def test_a_server_that_stands_and_says_nothing_is_not_waited_for():
    """It may be stopped, or be a tunnel's end. Its lines would hold the places of those who want another door."""
    one = Relay()
    for line in (1, 2):
        one.accept(line)
        one.feed(evr.LineSigned(line))
        one.feed(evr.LineDialled(line))
        one.feed(evr.LineGreeted(line, "CURVE"))
    one.until(14.9)
    one.feed(evr.LineAnswered(2))
    one.until(1000.0)
    assert one.dropped == {1: "the server said nothing for 15 s"}
    assert not one.machine.lines[2].is_stranger


def test_who_says_half_a_greeting_after_the_server_s_has_a_limit_still():
    """An answer is no greeting."""
    one = Relay()
    one.accept(1)
    one.feed(evr.LineSigned(1))
    one.feed(evr.LineDialled(1))
    one.feed(evr.LineAnswered(1))
    one.until(10.0)
    assert one.dropped == {1: "no greeting within 10 s"}


def test_a_twin_that_is_dialled_for_ever_is_not_waited_for():
    """Nobody reads the client meanwhile: one that left would keep a stranger's place."""
    one = Relay()
    one.accept(1)
    one.feed(evr.LineSigned(1))
    one.until(4.0)
    one.feed(evr.DialFailed(1, "connection refused"))
    one.until(9.9)
    assert not one.dropped
    one.until(10.0)
    assert one.dropped == {1: "no answer within 10 s"}
    one.accept(2)
    one.feed(evr.LineSigned(2))
    one.until(20.0)
    assert [note.text for note in one.notes] == [
        "cannot reach ps: connection refused; it is tried whenever a client wants it"
    ]
    assert one.machine.totals.dropped == {"no server": 2}


def test_places_of_strangers_that_leave_are_free_again():
    """A count that leaks would lock everybody out after a while."""
    one = Relay({"strangers": 2, "strangers_of_one": 2})
    for line in range(100):
        one.accept(line)
        one.feed(evr.LineEnded(line, "gone", 0, 0))
    assert not one.dropped
    assert not one.machine.lines


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_that_is_stuck_is_dropped(way):
    """Held bytes that nobody takes cost memory for a minute, also where something passes the other way."""

    def state(line, moved, held, other):
        return (line, moved, other, held, 0) if way == "up" else (line, other, moved, 0, held)

    one = Relay()
    for line in (1, 2, 3, 4):
        one.open(line)
    one.look(*(state(line, 10, 500, 10) for line in (1, 2, 3, 4)))
    for when in (20.0, 40.0, 59.9):
        one.now = when
        one.look(state(1, 10, 500, 10), state(2, 10, 500, 10 + when), state(3, when, 500, 10))
        assert not one.dropped
    one.look(state(4, 10, 0, 10))
    one.now = 60.0
    one.look(
        state(1, 10, 500, 10),
        state(2, 10, 500, 70),
        state(3, 59.9, 500, 10),
        state(4, 10, 500, 10),
    )
    assert one.dropped == dict.fromkeys((1, 2), "one side took nothing for 60 s")


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_slow_reader_takes_something_although_nothing_more_can_be_written(way):
    """A system calls a socket writable again when a third of its buffer is free: at 20 kB/s that is more than a minute."""

    def state(line, left, held):
        up_down = (1000, 0) if way == "up" else (0, 1000)
        helds = (held, 0) if way == "up" else (0, held)
        lefts = (left, 0) if way == "up" else (0, left)
        return (line, *up_down, *helds, *lefts)

    one = Relay()
    for line in (1, 2, 3):
        one.open(line)
    for second in range(0, 121, 10):
        one.now = float(second)
        one.look(state(1, 1000 - second, 50), state(2, 1000, 50), state(3, 700, 0))
        assert set(one.dropped) == (set() if second < 60 else {2, 3})


def test_a_line_that_is_idle_is_dropped():
    """Silence alone is allowed for an hour."""
    one = Relay()
    for line in (1, 2):
        one.open(line)
    one.look((1, 10, 10, 0, 0), (2, 10, 10, 0, 0))
    one.now = 1000.0
    one.look((1, 10, 10, 0, 0), (2, 10, 11, 0, 0))
    one.now = 3600.0
    one.look((1, 10, 10, 0, 0), (2, 10, 11, 0, 0))
    assert one.dropped == {1: "idle for 3600 s"}


def test_lines_are_looked_at_as_long_as_there_are_some():
    """And an idle relay has no timer at all."""
    one = Relay()
    assert one.machine.next_deadline() is None
    one.open(1)
    assert one.until(35.0) == [relay.LookAtLines()] * 3
    one.feed(evr.LineEnded(1, "gone", 5, 6))
    one.until(1000.0)
    assert one.machine.next_deadline() is None
    assert one.machine.carried == (5, 6)
    one.open(2)
    assert one.machine.next_deadline() is not None


def test_the_status_line_says_what_passed_since_the_last_one():
    """Bytes of lines that are there and of those that are gone, once each; nothing when nothing passed."""
    one = Relay()
    one.open(1)
    one.open(2, "b")
    one.look((1, 1_000_000, 5, 0, 0), (2, 500, 0, 0, 0))
    one.feed(evr.LineEnded(2, "gone", 600, 0))
    one.until(60.0)
    assert one.notes[0].text == "1 connection of 1 address, 1 MB up and 5 B down in the last 60 s"
    assert one.notes[0].facts == {
        "lines": 1,
        "addresses": 1,
        "up": 1_000_600,
        "down": 5,
        "dropped": 0,
    }
    one.until(180.0)
    assert len(one.notes) == 1


def test_asked_to_end_it_waits_until_the_lines_are_quiet():
    """A transfer gets a moment; heartbeats do not keep it."""
    one = Relay()
    one.open(1)
    assert one.feed(DrainAsked("SIGTERM")) == [relay.StopListening(), relay.LookAtLines()]
    one.look((1, 0, 0, 0, 0))
    size = 0
    for _ in range(4):
        assert one.until(one.now + 0.5) == [relay.LookAtLines()]
        size += 1_000_000
        one.look((1, size, 0, 0, 0))
    assert not one.finished
    one.until(one.now + 0.5)
    one.look((1, size + 10, 0, 77, 0))
    assert not one.finished, "something still waits inside"
    one.until(one.now + 0.5)
    one.look((1, size + 20, 0, 0, 0))
    assert one.finished == [Finish("SIGTERM")]
    assert one.machine.next_deadline() is None
    one.look((1, size + 30, 7, 0, 0))
    assert one.machine.carried == (size + 30, 7), "its summary is about all that passed"
    assert len(one.finished) == 1


def test_a_relay_that_ends_does_not_wait_for_ever_and_takes_nobody():
    """`drain_s` bounds it, whatever passes; without lines it ends at once."""
    one = Relay()
    one.open(1)
    one.feed(DrainAsked("Ctrl-C"))
    one.accept(2)
    assert one.dropped == {2: "the relay is ending"}
    one.until(10.0)
    assert one.finished == [Finish("Ctrl-C")]
    other = Relay()
    other.feed(DrainAsked("Ctrl-C"))
    assert other.finished == [Finish("Ctrl-C")]
    third = Relay()
    third.open(1)
    third.feed(DrainAsked("Ctrl-C"))
    third.feed(evr.LineEnded(1, "the client closed it", 0, 0))
    assert third.finished == [Finish("Ctrl-C")]


def test_late_words_about_a_line_change_nothing():
    """Sockets and machine disagree for a moment: what comes for a line that is gone, or twice, is ignored."""
    one = Relay()
    one.open(1)
    for event in (evr.LineSigned(1), evr.LineDialled(1), evr.DialFailed(1, "x")):
        assert one.feed(event) == []
    one.feed(evr.LineEnded(1, "gone", 1, 1))
    for event in (
        evr.LineSigned(1),
        evr.LineDialled(1),
        evr.LineGreeted(1, ""),
        evr.DialFailed(1, "x"),
        evr.LineEnded(1, "gone", 1, 1),
    ):
        assert one.feed(event) == []
    one.look((1, 5, 5, 5, 0))
    assert one.machine.carried == (1, 1)


def test_a_thousand_lines_leave_no_timers_behind():
    """The heap forgets what is over."""
    one = Relay({"strangers_of_one": 2000, "strangers": 2000})
    for line in range(1000):
        one.open(line)
        one.feed(evr.LineEnded(line, "gone", 0, 0))
    one.until(100.0)
    assert not one.machine._heap


def test_amounts_are_readable():
    """Three digits and a unit."""
    assert [amount(size) for size in (0, 999, 1000, 2_345_678, 12.3e9, 4567e9)] == [
        "0 B", "999 B", "1 kB", "2.35 MB", "12.3 GB", "4,567 GB",
    ]  # fmt: skip


def weigh(one, **held):
    """What lines hold, by name; returns which are dropped."""
    before = set(one.dropped)
    one.feed(evr.LinesWeighed(tuple((int(name[1:]), size) for name, size in held.items())))
    return set(one.dropped) - before


def test_those_who_hold_most_are_dropped_until_the_memory_is_enough():
    """No more of them; they are told of once, and a line that is gone holds nothing."""
    one = Relay(memory_bytes=1000)
    for line in range(1, 6):
        one.open(line)
    one.until(20.0)
    assert weigh(one, n1=250, n2=300, n3=200) == set()
    assert weigh(one, n1=150, n2=500, n3=100, n4=300, n5=200, n9=10_000) == {2}
    assert one.dropped[2] == "it held 500 B"
    assert weigh(one, n1=700, n2=900, n3=700, n4=50, n5=0) in ({1}, {3})
    assert [note.text for note in one.notes if "waits here" in note.text] == [
        "more waits here than 750 B: the connections on which most does are closed, and what they carried is sent again from the last chunk"
    ]
    assert one.machine.totals.dropped["memory"] == 2


def test_who_waits_for_the_server_is_not_known_for_waiting():
    """The server throws out who is not in its list, and cannot before it has taken the connection: its system does that without it."""
    one = Relay(memory_bytes=1000)
    for line in (1, 2):
        one.accept(line)
        one.feed(evr.LineSigned(line))
        one.feed(evr.LineDialled(line))
        one.feed(evr.LineGreeted(line, "CURVE"))
    one.until(14.0)
    one.feed(evr.LineAnswered(1))
    one.until(14.9)
    assert weigh(one, n2=251) == {2}
    one.until(28.9)
    assert one.machine.lines[1].is_stranger
    one.until(29.0)
    assert weigh(one, n1=750) == set()
    assert weigh(one, n1=751) == {1}
    one.open(3, "b")
    one.until(43.9)
    assert weigh(one, n3=251) == {3}


def test_the_address_of_a_stranger_that_held_too_much_is_shunned():
    """It would be as much again at once. Another address is not meant, nor is that of somebody who was known."""
    one = Relay(memory_bytes=1000)
    one.open(1, "b")
    one.until(20.0)
    one.open(2)
    assert weigh(one, n1=100, n2=300) == {2}
    one.accept(3)
    assert one.dropped[3] == "what a left here was too much"
    assert one.machine.totals.dropped["kept away"] == 1
    assert weigh(one, n1=751) == {1}
    assert one.accept(4, "b") == [relay.ReadGreeting(4)]
    one.until(25.0)
    assert one.accept(5) == [relay.ReadGreeting(5)]


def test_a_line_is_dropped_for_its_weight_once():
    """Its end may come later than the next weighing."""
    one = Relay(memory_bytes=1000)
    one.open(1)
    told = evr.LinesWeighed(((1, 2000),))
    first, second = (one.machine.handle(told, one.now) for _ in range(2))
    assert relay.DropLine(1, "it held 2 kB") in first
    assert second == []


def test_strangers_have_a_quarter_and_the_others_the_rest():
    """However much either hold, the others are not dropped for it."""
    one = Relay(memory_bytes=1000)
    one.open(1)
    one.until(20.0)
    for line in (2, 3, 4, 5):
        one.open(line)
    assert weigh(one, n1=750, n5=900) == {5}
    assert weigh(one, n1=750, n2=150, n3=900, n4=100) == {3}
    assert weigh(one, n1=751, n2=150, n4=100) == {1}
    assert weigh(one, n2=151, n4=100) == {2}


def test_many_small_lines_of_an_address_are_no_better_than_a_large_one():
    """Of strangers the address counts: who comes with a hundred lines pushes nobody out who has one. Of those who are known, the line."""
    one = Relay(memory_bytes=4000)
    one.open(1, "honest")
    for line in range(10, 20):
        one.open(line, "crowd")
    held = {f"n{line}": 90 for line in range(10, 20)}
    dropped = weigh(one, n1=400, **held)
    assert len(dropped) == 4
    assert dropped < set(range(10, 20))
    one.until(20.0)
    assert weigh(one, n1=3001, **held) == {1}


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.sampled_from("abc")), max_size=12),
    st.integers(100, 4000),
)
def test_who_holds_no_more_than_an_equal_share_stays(lines, memory):
    """And what is left fits, of strangers and of the others."""
    one = Relay(memory_bytes=memory)
    for number, (is_known, _, source) in enumerate(lines):
        if is_known:
            one.open(number, source)
    one.until(20.0)
    for number, (is_known, _, source) in enumerate(lines):
        if not is_known:
            one.open(number, source)
    dropped = weigh(one, **{f"n{number}": held for number, (_, held, _) in enumerate(lines)})
    part = memory // 4
    for is_known, whole in ((True, memory - part), (False, part)):
        groups = {}
        for number, (known, held, source) in enumerate(lines):
            if known == is_known:
                groups.setdefault(number if known else source, {})[number] = held
        left = [
            held
            for group in groups.values()
            for number, held in group.items()
            if number not in dropped
        ]
        assert sum(left) <= whole
        for group in groups.values():
            assert not dropped & set(group) or sum(group.values()) > whole // len(groups)

"""A relay that weighs what waits in it: told when it is much, and who is dropped comes again and goes on."""

import pytest

from fsl_async.nodes.relay.shell import WEIGH_EVERY_S, WEIGHING_PART, RelayShell
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.relay import events as evr
from fsl_async.roles.relay.relay import DoorRules, RelayMachine, RelayRules
from fsl_transport import VirtualScheduler

MEMORY_BYTES = 8000


class Board:
    """A switchboard with lines of chosen weights."""

    def __init__(self):
        self.weights = []
        self.dropped = []
        self.asked = 0

    def weigh(self):
        """What the lines hold."""
        self.asked += 1
        return self.weights

    def drop(self, line, reason):
        """Remember it."""
        self.dropped.append((line, reason))

    def greet(self, line):
        """Nothing."""

    def carried(self):
        """Nothing either."""
        return []


@pytest.fixture
def parts():
    """A shell with its machine, board and clock; and what the machine was told."""
    clock, told = VirtualScheduler(), []
    rules = RelayRules(doors=(DoorRules(name="ps", sealed=True),), memory_bytes=MEMORY_BYTES)
    machine = RelayMachine(rules)
    handle = machine.handle

    def watch(event, now):
        if isinstance(event, evr.LinesWeighed):
            told.append(event.held)
        return handle(event, now)

    machine.handle = watch
    shell = RelayShell(
        machine, scheduler=clock, journal=TraceHash(), say=lambda _: None, finished=lambda _: None
    )
    shell.switchboard = Board()
    return shell, clock, told


def test_much_is_told_and_little_is_not(parts):
    """Beyond a quarter of the memory, which is what strangers may hold."""
    shell, clock, told = parts
    for line in (1, 2):
        shell.accepted(line, 0, "a")
    shell.weigh()
    shell.switchboard.weights = [(1, 500), (2, 1500)]
    clock.run_until(5.05)
    assert told == []
    assert shell.switchboard.asked == 1 + int(5.05 / WEIGH_EVERY_S)
    shell.switchboard.weights = [(1, 500), (2, 1501)]
    clock.run_until(5.1 + WEIGH_EVERY_S)
    assert told == [((1, 500), (2, 1501))]
    assert shell.switchboard.dropped == [(2, "it held 1.5 kB")]


def test_what_stays_is_told_every_second_and_what_grows_at_once(parts):
    """Each time goes into the journal."""
    shell, clock, told = parts
    shell.weigh()
    shell.switchboard.weights = [(1, 4000)]
    clock.run_until(4.95)
    assert len(told) == 5
    shell.switchboard.weights = [(1, 4500)]
    clock.run_until(5.05)
    assert len(told) == 5, "a sixteenth is not much more"
    shell.switchboard.weights = [(1, 4501)]
    clock.run_until(5.15)
    assert told[5:] == [((1, 4501),)]
    shell.switchboard.weights = [(1, 3000)]
    clock.run_until(5.25)
    assert len(told) == 6
    shell.switchboard.weights = [(1, 3501)]
    clock.run_until(5.35)
    assert told[6:] == [((1, 3501),)], "more than there was since"


def test_no_more_than_a_part_of_the_time_goes_into_weighing(parts):
    """With thousands of lines it takes a while."""
    shell, clock, _ = parts
    weigh = shell.switchboard.weigh

    def slow():
        clock.run_until(clock.time() + 0.05)
        return weigh()

    shell.switchboard.weigh = slow
    shell.weigh()
    clock.run_until(0.05 + 10.5 * (0.05 + WEIGHING_PART * 0.05))
    assert shell.switchboard.asked == 11


def test_after_the_end_nothing_is_weighed(parts):
    """Its switchboard is closed then."""
    shell, clock, told = parts
    shell.switchboard.weights = [(1, MEMORY_BYTES)]
    shell.weigh()
    assert len(told) == 1
    shell.close()
    clock.run_until(10.0)
    assert len(told) == shell.switchboard.asked == 1

"""Tags of messages, events and effects; the machines' tables, and what these refuse."""

import gc
import inspect
import re

import pytest
from attrs import frozen
from configs import config_of, roster_of

from fsl_async.roles.groups import messages as groups_messages
from fsl_async.roles.groups.coordinator import GroupsCoordinator
from fsl_async.roles.groups.member import GroupMember
from fsl_async.roles.machine import Done, Effect, Event, Offered, Received
from fsl_async.roles.messages import Message, MessageError, Table
from fsl_async.roles.split import messages as split_messages
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.sync import messages
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.ps import Merging, ParameterServerMachine
from fsl_async.roles.sync.weighting import TokensWeighting


def classes(base):
    """Every subclass of `base` in the program."""
    gc.collect()  # attrs replaces a class by one with slots, and the first one stays till then
    found = {one for kind in base.__subclasses__() for one in (kind, *classes(kind))}
    return {one for one in found if one.__module__.startswith("fsl_async")}


def test_an_error_without_a_text_is_a_problem():
    """No problem means that the effect is carried out: a client would be welcomed all the same."""
    assert Done.failed(Effect(), MemoryError()).problem == "MemoryError"
    assert Done.failed(Effect(), OSError("disk full")).problem == "disk full"


@pytest.mark.parametrize("base", [Event, Effect, Message])
def test_no_two_classes_have_one_tag(base):
    """A peer or a reader of the journal could not distinguish them."""
    found = classes(base)
    assert len(found) > 10
    assert len({one.tag for one in found}) == len(found)


def test_events_and_effects_share_the_journals_types():
    """A line's type is enough, without its `kind`, but for effects that are events elsewhere."""
    both = classes(Event) & classes(Effect)
    shared = {one.tag for one in classes(Event)} & {one.tag for one in classes(Effect)}
    assert shared == {one.tag for one in both}


def test_a_class_without_a_tag_is_an_error():
    """A forgotten tag must not be inherited: two kinds of lines would become one."""
    with pytest.raises(TypeError, match="Forgotten needs a tag"):

        @frozen
        class Forgotten(Event):
            """Has none."""


def test_a_renamed_message_is_the_same_on_the_wire():
    """Peers compare the tag."""

    @frozen
    class NewName(Message, tag="fetch/1"):
        """Takes the fields of Fetch."""

        version: int

    assert Table(NewName).to_wire(NewName(3)) == {"m": "fetch/1", "version": 3}
    with pytest.raises(MessageError, match="unknown"):
        messages.from_wire({"m": "Fetch", "version": 3, "digest": ""})


SPLIT = config_of("split", method="sl")
GROUPS = [config_of("groups", name=name, roster=roster_of("ab")) for name in "ab"]
MACHINES = [
    ParameterServerMachine(config_of("sync", trigger="clock"), Merging(), TokensWeighting(), "run"),
    ClientMachine("a", 1),
    SplitServerMachine(SPLIT, {}),
    SplitClientMachine(SPLIT, "a", 1),
    GroupsCoordinator(GROUPS[0]),
    GroupMember(GROUPS[1]),
]


@pytest.mark.parametrize("made", MACHINES, ids=lambda one: type(one).__name__)
def test_the_table_in_the_docstring_names_all_events(made):
    """A reader finds each event and message there, and none that is gone."""
    lines = inspect.getmodule(type(made)).__doc__.split("\n")
    (first,) = [at for at, line in enumerate(lines) if "event or message" in line]
    start, stop = lines[first].index("event"), lines[first].index("->")
    cells = " ".join(line[start:stop] for line in lines[first + 1 : lines.index("", first)])
    names = set(re.findall(r"\b[A-Z]\w+", cells))
    assert names == {kind.__name__ for kind in made.handlers} - {"TimerFired"}


@pytest.mark.parametrize(
    ("number", "event", "text"),
    [
        (0, Received("a", messages.Publish()), "Publish is no message of a client"),
        (0, Received("a", messages.InitialMeta("f")), "InitialMeta is not sent in this way"),
        (0, Offered("a", messages.Skip(0, ""), "s"), "a client streams no Skip"),
        (1, Received("", messages.Skip(0, "")), "Skip is no message of a parameter server"),
        (2, Received("a", split_messages.PsHello("r", "x")), "PsHello is not sent in this way"),
        (3, Received("", split_messages.RunOver("x")), "RunOver is no message of a split server"),
        (5, Received("", groups_messages.Ending(False)), "Ending is no message of a coordinator"),
    ],
)
def test_a_message_that_its_peer_may_not_send(number, event, text):
    """One that is metadata, or of a handshake, comes in no other way."""
    with pytest.raises(MessageError, match=text) as found:
        MACHINES[number].check(event)
    assert found.value.code == "unexpected-message"

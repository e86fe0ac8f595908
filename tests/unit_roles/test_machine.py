"""Tags: kinds on the wire and types in the journal do not depend on names of classes."""

import inspect

import pytest
from attrs import frozen

from fsl_async.roles import machine
from fsl_async.roles.machine import Effect, Event
from fsl_async.roles.messages import Message, MessageError, Table
from fsl_async.roles.split import effects as split_effects
from fsl_async.roles.split import events as split_events
from fsl_async.roles.split import messages as split_messages
from fsl_async.roles.sync import effects, events, messages

MODULES = (
    machine, events, effects, split_events, split_effects, messages, split_messages,
)  # fmt: skip


def classes(base):
    """Every subclass of `base` in the modules of roles."""
    found = [one for module in MODULES for one in vars(module).values() if inspect.isclass(one)]
    return {one for one in found if issubclass(one, base) and one is not base}


@pytest.mark.parametrize("base", [Event, Effect, Message])
def test_no_two_classes_have_one_tag(base):
    """A peer or a reader of the journal could not distinguish them."""
    found = classes(base)
    assert len(found) > 10
    assert len({one.tag for one in found}) == len(found)


def test_events_and_effects_share_the_journals_types():
    """A line's type is enough, without its `kind`."""
    assert not {one.tag for one in classes(Event)} & {one.tag for one in classes(Effect)}


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

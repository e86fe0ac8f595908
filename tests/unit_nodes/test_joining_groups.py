"""A run directory and a place in a roster that do not go together."""

import pytest
from configs import config_of, roster_of

from fsl_async.config.settings import roster_of as servers_of
from fsl_async.errors import ConfigError, RunDirError
from fsl_async.nodes.ps.joining_groups import check_history, check_keys
from fsl_async.roles.groups.events import Decision, GroupsRecovered

ROSTER = ("north", "south")
BEGUN = Decision(0, 0, "0" * 32, "5" * 32)


@pytest.mark.parametrize(
    ("name", "version", "state", "words"),
    [
        ("south", 3, GroupsRecovered(), "would replace: give a new --run-dir"),
        ("north", 9, GroupsRecovered(2, "1" * 32), "put that one first again"),
        ("north", 9, GroupsRecovered(2, "1" * 32, decided=BEGUN), "lacks the decision of global w"),
    ],
)
def test_a_past_that_would_be_lost_or_not_continued_is_one_line(name, version, state, words):
    """A member's own run would be overwritten; a member that is made the first has no decisions."""
    with pytest.raises(RunDirError, match=words):
        check_history(config_of("groups", name=name, roster=roster_of(ROSTER)), version, state)


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("south", -1, GroupsRecovered()),
        ("south", 4, GroupsRecovered(1, "1" * 32)),
        ("north", -1, GroupsRecovered()),
        ("north", 3, GroupsRecovered()),
        ("north", 4, GroupsRecovered(0, BEGUN.digest, decided=BEGUN)),
    ],
)
def test_new_groups_and_those_that_go_on(name, version, state):
    """The first one may bring a run of its own into the groups."""
    check_history(config_of("groups", name=name, roster=roster_of(ROSTER)), version, state)


KEYED = "north=fsl://10.0.0.1:7100?key=" + "k" * 40
PLAIN = "south=fsl://10.0.0.2:7100"


@pytest.mark.parametrize(
    ("has_keys", "words"), [(True, "south has no key"), (False, "north has a key, and")]
)
def test_all_parameter_servers_encrypt_or_none(has_keys, words):
    """One without a key would dial for ever, or send in the clear what others encrypt."""
    with pytest.raises(ConfigError, match=words):
        check_keys(servers_of(f"{KEYED}, {PLAIN}"), has_keys=has_keys)
    check_keys(servers_of(f"{PLAIN}, {PLAIN.replace('south', 'east')}"), has_keys=False)

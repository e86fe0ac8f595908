"""The table [groups]: every mistake is one line that says what to do."""

import pytest

from fsl_async.config.load import load
from fsl_async.config.recipes import check_groups, groups_host, with_implied
from fsl_async.errors import ConfigError
from fsl_async.roles.groups.messages import PIECE_VALUES

ROSTER = "north=tcp://10.0.0.1:7100, south=fsl://10.0.0.2:7100"


def loaded(*overrides):
    return load(None, [f"groups.roster={ROSTER}", "run.name=south", *overrides])


def test_the_first_name_coordinates():
    """The roster is ordered, and each address may have a key."""
    config = loaded("listen.address=tcp://10.0.0.2:7100")
    check_groups(config)
    assert tuple(config.groups.servers) == ("north", "south")
    assert not config.leads
    assert config.groups.coordinator == "north"
    assert groups_host(config) == "10.0.0.2"
    assert config.groups.piece_values == PIECE_VALUES


def test_pieces_are_small_where_the_rate_is_limited():
    """A heartbeat must not wait for seconds behind a piece."""
    assert loaded("groups.bytes_per_s=1e6").groups.piece_values == 125_000


@pytest.mark.parametrize(
    ("roster", "problem"),
    [
        ("north", "must be like north=fsl://"),
        ("a=tcp://10.0.0.1:1, a=tcp://10.0.0.2:1", "names a twice"),
        ("a=tcp://10.0.0.1:1", "two parameter servers or more"),
        ("a=tcp://10.0.0.1:1, b=10.0.0.2", "b: 10.0.0.2: no port"),
        ("a=tcp://*:1, b=tcp://10.0.0.2:1", "means every interface"),
        ("a b=tcp://10.0.0.1:1, b=tcp://10.0.0.2:1", "must be like north=fsl://"),
    ],
)
def test_a_wrong_roster(roster, problem):
    """What is wrong is named with an example."""
    with pytest.raises(ConfigError, match=problem):
        load(None, [f"groups.roster={roster}"])


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.name=east"], "east is not in groups.roster"),
        (["sync.trigger=rounds"], "choose clock"),
        (["tune.method=lora", "sync.trigger=clock"], "remove groups.roster"),
        (["groups.bind=8.8.8.8"], "a public address"),
        (["listen.address=tcp://0.0.0.0:7100"], "set groups.bind"),
        (["listen.address=tcp://example.org:7100"], "set groups.bind"),
    ],
)
def test_what_cannot_be_a_group(overrides, problem):
    """Checked before anything is created on disk."""
    with pytest.raises(ConfigError, match=problem) as caught:
        check_groups(with_implied(loaded("listen.address=tcp://10.0.0.2:7100", *overrides)))
    assert "\n" not in caught.value.message


def test_a_public_address_can_be_accepted():
    """Only by a setting of its own."""
    check_groups(loaded("groups.bind=8.8.8.8", "groups.insecure=true"))


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "localhost", "10.0.0"])
def test_bind_is_an_address_of_this_machine(bind):
    """No host name is looked up: Debian maps its own to 127.0.1.1."""
    with pytest.raises(ConfigError, match="must be an IP address of this machine"):
        load(None, [f"groups.bind={bind}"])


def test_a_roster_of_thirty_servers_with_keys_fits():
    """An address with a key has about 100 characters."""
    roster = ", ".join(f"group-{n}=fsl://10.0.0.{n}:7100?key={'k' * 80}" for n in range(1, 31))
    assert len(load(None, [f"groups.roster={roster}"]).groups.servers) == 30

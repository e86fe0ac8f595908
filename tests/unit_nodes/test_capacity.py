"""Open files: how many clients fit, their `stripes_limit`, and when a process does not start."""

import itertools

import pytest

from fsl_async.config.load import load
from fsl_async.errors import ConfigError, UsageError
from fsl_async.nodes.capacity import capacity_of, check_open_files, within
from fsl_async.nodes.relay import relay as relay_node
from fsl_transport.zmq.admission import connections_within, files_for, in_use


def config(clients, **more):
    settings = {"sync.clients": clients, **more}
    return load(None, [f"{key}={value}" for key, value in settings.items()])


@pytest.mark.parametrize("held", [0, 8, 150])
def test_the_named_limit_is_enough_and_not_too_high(held):
    """An operator who sets the named limit can start."""
    for connections in [*range(1, 3000, 7), 16_384]:
        files = files_for(connections, held)
        assert connections_within(files, held) >= connections
        assert connections_within(files - 2, held) < connections


def test_more_files_never_mean_fewer_connections():
    """The reserve grows with the limit, and at most as fast."""
    found = [connections_within(files, 8) for files in range(20_000)]
    assert all(one <= other for one, other in itertools.pairwise(found))
    assert found[200] == 200 - 72, "not one"
    assert found[1024] == 768
    assert found[8192] == 8192 - 512


def test_few_files_are_divided_among_the_planned_clients():
    """The first clients on long paths must not take the connections of the others."""
    few = capacity_of(config(40), 200, 8, 16_384, trains=False)
    assert (few.connections, few.fits, few.each) == (128, 64, 3)
    assert few.is_enough
    assert not few.is_ample
    assert within(config(40), few).transfer.stripes_limit == 2
    ample = capacity_of(config(40), 20_000, 8, 16_384, trains=False)
    assert ample.is_ample
    assert within(config(40), ample) == config(40)


def test_two_listeners_and_pytorch_leave_less():
    """A process with parameter server and split server has one limit for both."""
    alone = capacity_of(config(3), 300, 8, 16_384, trains=False)
    trains = capacity_of(config(3), 300, 8, 16_384, trains=True)
    both = capacity_of(config(3), 300, 8, 16_384, trains=True, listeners=2)
    assert alone.connections > trains.connections > 2 * both.connections
    assert capacity_of(config(3), both.files_needed, 8, 16_384, trains=True, listeners=2).is_enough


def test_a_plan_beyond_max_connections_does_not_depend_on_files():
    """A higher limit of open files would not help."""
    found = capacity_of(config(100_000), 1 << 20, 8, 16_384, trains=False)
    assert found.is_enough
    assert found.is_ample


def test_too_low_a_limit_prevents_the_start(monkeypatch):
    """The planned clients could not connect."""
    monkeypatch.setattr("fsl_async.nodes.capacity.descriptors", lambda: 100)
    monkeypatch.setattr("fsl_async.nodes.capacity.in_use", lambda: 8)
    assert check_open_files(config(14)).fits == 14
    with pytest.raises(ConfigError, match=r"room for 14 of .* = 15: .*ulimit -n 102") as found:
        check_open_files(config(15))
    assert found.value.key == "sync.clients"


def test_a_relay_needs_room_for_one_client(monkeypatch):
    """One address gets half of its connections."""
    least = relay_node.LEAST_CONNECTIONS
    monkeypatch.setattr(relay_node, "connections_allowed", lambda: least)
    assert relay_node.checked_connections() == least
    monkeypatch.setattr(relay_node, "connections_allowed", lambda: least - 1)
    with pytest.raises(UsageError, match=r"ulimit -n 160\)"):
        relay_node.checked_connections()


def test_open_descriptors_are_counted():
    """Systems that do not count them give 0."""
    before = in_use()
    with open("/dev/null", "rb"):  # noqa: PTH123
        assert in_use() in {before + 1, 0}

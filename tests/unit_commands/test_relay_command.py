"""`--role relay`: its ports, and the line for its clients."""

import json

import pytest

from fsl_async import cli
from fsl_async.commands.relay import join_line, routes_of
from fsl_async.errors import UsageError
from fsl_async.nodes.relay.relay import MOST_CONNECTIONS, Route, connections_allowed

KEY = "a" * 40


def test_the_line_for_clients_has_the_relays_address_and_the_servers_key():
    """Encryption is end to end: a client checks the parameter server's key, not the relay's."""
    line = join_line(f"fsl://ps.org:7100?key={KEY}", [("10.0.0.1", 7200)])
    assert line.endswith(f"'fsl://10.0.0.1:7200?key={KEY}'")
    line = join_line(
        f"fsl://ps.org:7100?key={KEY}&split=split.org:7101", [("10.0.0.1", 1), ("10.0.0.1", 2)]
    )
    assert line.endswith(f"'fsl://10.0.0.1:1?key={KEY}&split=10.0.0.1:2'")


def test_routes():
    """One for each server; what is encrypted to one must not be readable on the other's."""
    server = f"fsl://ps.org:7100?key={KEY}"
    first = Route("tcp://0.0.0.0:7100", "tcp://ps.org:7100", requires_curve=True)
    assert routes_of(server, "*:7100", None, insecure=False) == [first]
    second = Route("tcp://0.0.0.0:7101", "tcp://split.org:9", requires_curve=True)
    assert routes_of(server, "*:7100", "7101=split.org:9", insecure=False) == [first, second]
    both = f"{server}&split=split.org:9"
    assert routes_of(both, "*:7100", "7101", insecure=False) == [first, second]
    (route,) = routes_of("ps.org:7100", "*:7100", None, insecure=True)
    assert not route.requires_curve


@pytest.mark.parametrize("listen", ["127.0.0.1:7100", "0.0.0.0:7100"])
def test_a_relay_to_itself_is_refused(listen):
    """On one machine its default port is the parameter server's: it would dial itself forever."""
    with pytest.raises(UsageError, match="to itself: give --listen another port"):
        routes_of("127.0.0.1:7100", listen, None, insecure=True)


@pytest.mark.parametrize(
    ("server", "listen"), [("ps.org:7100", "127.0.0.1:1"), ("127.0.0.1:1", "10.0.0.1:1")]
)
def test_readable_traffic_needs_insecure(server, listen):
    """On the way to the parameter server, and on the way from the clients."""
    with pytest.raises(UsageError, match="has no key"):
        routes_of(server, listen, None, insecure=False)


def test_a_dry_run_opens_nothing(capsys):
    """It only prints the routes."""
    line = f"--role relay --dry-run --json --listen *:1 fsl://ps.org:2?key={KEY}"
    assert cli.main(line.split()) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["routes"] == ["tcp://0.0.0.0:1 -> tcp://ps.org:2"]
    assert shown["encrypted"] is True


def test_no_more_connections_than_there_are_files(monkeypatch):
    """More connections than file descriptors would make the relay hang at accept."""
    found = [256]
    monkeypatch.setattr("fsl_async.nodes.relay.relay.descriptors", lambda: found[-1])
    assert connections_allowed() == (256 - 128) // 2
    found.append(100_000)
    assert connections_allowed() == MOST_CONNECTIONS == 4096
    found.append(10)
    assert connections_allowed() == 1

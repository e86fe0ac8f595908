"""`--role relay`: which ports it opens, and what it tells its clients to paste."""

import json

import pytest

from fsl_async import cli
from fsl_async.commands.relay import doors_of, join_line
from fsl_async.errors import UsageError
from fsl_async.nodes.relay.node import Door, lines_allowed, serve, usual_memory_mib
from fsl_async.nodes.relay.shell import RelayShell
from fsl_async.process.stopper import Stopper

KEY = "a" * 40


def test_the_line_for_clients_has_the_relays_place_and_the_servers_key():
    """The key makes it end to end: a client checks the server's, not the relay's."""
    line = join_line(f"fsl://ps.org:7100?key={KEY}", [("10.0.0.1", 7200)])
    assert line.endswith(f"'fsl://10.0.0.1:7200?key={KEY}'")
    line = join_line(
        f"fsl://ps.org:7100?key={KEY}&split=split.org:7101", [("10.0.0.1", 1), ("10.0.0.1", 2)]
    )
    assert line.endswith(f"'fsl://10.0.0.1:1?key={KEY}&split=10.0.0.1:2'")


def test_doors():
    """One for each server; who came encrypted to the one must not be readable on the way to the other."""
    server = f"fsl://ps.org:7100?key={KEY}"
    first = Door("tcp://0.0.0.0:7100", "tcp://ps.org:7100", sealed=True)
    assert doors_of(server, "*:7100", None, insecure=False) == [first]
    second = Door("tcp://0.0.0.0:7101", "tcp://split.org:9", sealed=True)
    assert doors_of(server, "*:7100", "7101=split.org:9", insecure=False) == [first, second]
    assert doors_of(f"{server}&split=split.org:9", "*:7100", "7101", insecure=False) == [
        first,
        second,
    ]
    (door,) = doors_of("ps.org:7100", "*:7100", None, insecure=True)
    assert not door.sealed


@pytest.mark.parametrize(
    ("server", "listen"), [("ps.org:7100", "127.0.0.1:1"), ("127.0.0.1:1", "10.0.0.1:1")]
)
def test_readable_traffic_needs_to_be_meant(server, listen):
    """On the way to the server, and on the way from the clients."""
    with pytest.raises(UsageError, match="has no key"):
        doors_of(server, listen, None, insecure=False)


def test_a_dry_run_says_what_would_be(capsys):
    """Nothing is opened."""
    args = [
        "--role",
        "relay",
        "--dry-run",
        "--json",
        "--listen",
        "*:1",
        f"fsl://ps.org:2?key={KEY}",
    ]
    assert cli.main(args) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["doors"] == ["tcp://0.0.0.0:1 -> tcp://ps.org:2"]
    assert told["sealed"] is True


def test_no_more_lines_than_there_are_files(monkeypatch):
    """Promising places that the system does not give would end in a relay that spins at accept."""
    import resource

    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert lines_allowed(4096) == (256 - 128) // 2
    limits[:] = [(256, 100_000)]
    assert lines_allowed(4096) == 4096
    assert limits[-1] == (4096 * 2 + 128, 100_000)
    limits[:] = [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]
    assert lines_allowed(4096) == 4096


def test_the_memory_is_the_machines_where_nobody_says_it(capsys, monkeypatch):
    """A quarter of it, within bounds; and it is a relay's alone."""
    for pages, mib in ((1, 128), (1 << 18, 256), (1 << 30, 2048), (0, 2048), (-1, 2048)):
        sizes = {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr("os.sysconf", sizes.get)
        assert usual_memory_mib() == mib
    relay = ["--role", "relay", "--dry-run", "--json"]
    assert cli.main([*relay, f"fsl://127.0.0.1:2?key={KEY}"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_mib"] == 2048
    assert cli.main([*relay, "--memory", "300", f"fsl://127.0.0.1:2?key={KEY}"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_mib"] == 300
    assert cli.main([*relay, "--memory", "100", f"fsl://127.0.0.1:2?key={KEY}"]) == 2
    assert cli.main(["--role", "client", "--memory", "300", "127.0.0.1:2"]) == 2
    assert "--memory is a relay's" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "mib"), [(300, 300), (0, 2048)])
def test_a_relay_weighs_what_waits_in_it(monkeypatch, given, mib):
    """From its beginning, against the memory that it was given."""
    weighed = []
    monkeypatch.setattr(
        RelayShell, "weigh", lambda shell: weighed.append(shell.machine.rules.memory_bytes)
    )
    monkeypatch.setattr("fsl_async.nodes.relay.node.usual_memory_mib", lambda: 2048)
    stop = Stopper()
    serve(
        [Door("tcp://127.0.0.1:0", "tcp://127.0.0.1:1", sealed=False)],
        run_dir=None,
        memory_mib=given,
        announce=lambda _: stop.request(),
        tell=lambda _: None,
        stop=stop,
    )
    assert weighed == [mib << 20]

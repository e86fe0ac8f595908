"""Links have the settings they are given, as measured from the sites with this machine's backend.

Bounds are generous.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from netlab.__main__ import main
from netlab.host import LabError, started
from netlab.laboratory import Laboratory

from fsl_async.tools.chaos.targets import Node, Run, link_of

SLOW = float(os.environ.get("FSL_TEST_TIME_UNIT", "1"))


def pings(lab, count, interval_s, wait_s=0.3, site="client-1"):
    return lab.probe(site, "ping", lab.address("server"), str(count), str(interval_s), str(wait_s))


def test_round_trip_of_a_profile(lab):
    """Both directions have the profile's delay: a round trip takes twice that, and little more."""
    lab.set("client-1", "transatlantic")
    measured = lab.round_trip_ms("client-1", "server")
    assert 89.5 < measured < 90 + 30 * SLOW
    assert lab.round_trip_ms("client-2", "server") < 45


def test_rates_are_kept(lab):
    """A link of 10 Mbit/s to the server carries at most that, and at least half; and so the other
    way, where it has 3.
    """
    lab.set("client-1", "dsl:down=3mbit")
    assert 5 < lab.stream("client-1", "server", seconds=1.5).mbit_s < 10.1
    assert 1.5 < lab.stream("server", "client-1", seconds=1.5).mbit_s < 3.05


def test_cut_and_heal(lab):
    """A cut link carries nothing, the other one goes on; a healed link has its settings back."""
    lab.set("client-1", "delay=10")
    lab.cut("client-1")
    assert pings(lab, 5, 0.01, 0.3)["received"] == 0
    assert lab.round_trip_ms("client-2", "server") < 45
    lab.set("client-1", "delay=15")  # a cut link can be changed, and stays cut
    assert pings(lab, 3, 0.01, 0.3)["received"] == 0
    lab.heal("client-1")
    assert 29 < lab.round_trip_ms("client-1", "server") < 30 + 30 * SLOW


@pytest.mark.parametrize("settings", ["dsl", "up=2mbit"])
def test_a_storm_finds_the_links_of_a_run_and_restores_them(lab, tmp_path, settings):
    """`chaos --partition --slow` hits the site of a client's process and no other, whatever the
    laboratory's name.
    """
    lab.set("client-2", settings)
    links = lambda: Laboratory.find(lab.name).links  # noqa: E731 - as another process reads them
    before, run = links(), Run(tmp_path, lambda _: {})
    with subprocess.Popen(lab.command("client-2", ["sleep", "60"])) as process:
        try:
            link = in_time(lambda: link_of(run, Node(process.pid, "b", "client")))
            link("partition")
            assert lab.round_trip_ms("client-1", "server") < 45
            assert pings(lab, 3, 0.01, 0.3, "client-2")["received"] == 0
            link("open")
            assert links() == before
            link("slow")
            rates = [one.settings.rate_mbit for one in links().values()]
            assert sorted(rates) == [0.0, 0.16]
            link("open")
            assert links() == before
        finally:
            process.kill()


def in_time(find):
    """Return the first result of `find` that is not None: a process enters its site after a
    moment.
    """
    for _ in range(500):
        if (found := find()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("nothing was found")


def test_status_and_a_name_that_is_taken(lab, capsys):
    """Another process reads what this one set, and cannot make a second laboratory of that name."""
    lab.set("client-1", "dsl")
    lab.cut("client-2")
    assert main(["status", "--name", lab.name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == lab.backend
    first, second = found["links"]
    assert first["profile"] == "dsl"
    assert 59 < first["round_trip_ms"] < 60 + 40 * SLOW
    assert second["cut"]
    assert main(["up", "--name", lab.name]) == 2
    assert "is up" in capsys.readouterr().err


def test_the_remains_of_a_crash_are_removed(sweeper, left, capsys):
    """After kill -9 of the owner, with a process in a site, the next `down` removes everything."""
    name = f"crash{os.getpid()}"
    sweeper(name)
    make = (
        "import subprocess, sys; from fsl_async.errors import has_benchmarks\n"
        "assert has_benchmarks(); from netlab.laboratory import Laboratory\n"
        f"lab = Laboratory(['a', 'b'], name={name!r}); lab.up()\n"
        "child = subprocess.Popen(lab.command('a', ['sleep', '600'])); print(child.pid, "
        "flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        sleeper = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    assert left(name)
    with pytest.raises(LabError, match="has crashed"):
        Laboratory.find(name)
    assert main(["down", "--name", "another"]) == 0
    assert f"removed what was left of the laboratory {name}" in capsys.readouterr().out
    assert left(name) == []
    assert not started(sleeper)

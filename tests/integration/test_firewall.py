"""Runs through relays between real firewalls in real network namespaces.

    far site - outer router - inner router - server
                                  |
                              near site

With the firewalls up these connections are allowed: from the far site to the outer router, from the
outer router to the inner router, from the near site to the inner router, from the inner router to
the parameter server. Routers forward nothing. So the far site trains through two relays in a row,
the near site through one.
"""

import os
import shutil
import signal
import subprocess
import sys

import attrs
import pytest

from fsl_async.config import address as addresses
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.ledger_audit import audit_run

pytestmark = pytest.mark.slow

LINKS = (("far", "outer", 1), ("outer", "inner", 2), ("inner", "server", 3), ("near", "inner", 4))
"""Both ends of each link, and its number in the addresses: the first end is .2, the second .1."""
GATEWAYS = {"far": "10.93.1.1", "outer": "10.93.2.1", "near": "10.93.4.1", "server": "10.93.3.2"}
OUTER, INNER, NEAR_INNER, SERVER = "10.93.1.1", "10.93.2.1", "10.93.4.1", "10.93.3.1"
"""Addresses: the outer router; the inner router from there and from the near site; the server."""
FAR_BACK, INNER_BACK = "10.93.1.0/24", "10.93.3.2"
CLIENT_SIDE = ("far", "outer", "near", "inner")
MAY_REACH = {"far": (OUTER,), "near": (NEAR_INNER,), "outer": (INNER, FAR_BACK)}
"""The only destinations that these machines may send to; a router's answers go back to its site."""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"


def missing():
    """Return why there can be no firewall here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root: network namespaces"
    for name in ("ip", "nft"):
        if shutil.which(name) is None:
            return f"{name} is not installed: bin/netlab-setup does it"
    tried = subprocess.run(
        ["unshare", "--net", "nft", "add", "table", "inet", "x"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "this kernel has no nftables or no namespaces"


class Walls:
    """The namespaces and their links. Until `close`, routers forward and every connection is
    allowed.
    """

    def __init__(self):
        names = dict.fromkeys(name for link in LINKS for name in link[:2])
        self.names = {name: f"fsl-wall-{os.getpid()}-{name}" for name in names}

    def ip(self, *words):
        """Run `ip`."""
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    def build(self):
        """Make namespaces, links, addresses and routes."""
        for name in self.names.values():
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        for *ends, number in LINKS:
            first, second = (self.names[end] for end in ends)
            devices = f"to-{ends[1]}", f"to-{ends[0]}"
            words = ("type", "veth", "peer", "name", devices[1], "netns", second)
            self.ip("link", "add", devices[0], "netns", first, *words)
            for where, device, host in zip((first, second), devices, (2, 1), strict=True):
                self.ip("-n", where, "addr", "add", f"10.93.{number}.{host}/24", "dev", device)
                self.ip("-n", where, "link", "set", device, "up")
        for name, gateway in GATEWAYS.items():
            self.ip("-n", self.names[name], "route", "add", "default", "via", gateway)
        self.ip("-n", self.names["inner"], "route", "add", FAR_BACK, "via", "10.93.2.2")
        for name in ("outer", "inner"):
            self.run(name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def close(self):
        """Allow only the connections that the head of this file lists."""
        chain = "add chain ip wall {0} {{ type filter hook {0} priority 0; policy drop; }}; "
        for name in ("outer", "inner"):
            self.run(name, "nft", "add table ip wall; " + chain.format("forward"))
        for name, places in MAY_REACH.items():
            rules = f"add rule ip wall output ip daddr {{ {', '.join(places)} }} accept"
            self.run(name, "nft", "add table ip wall; " + chain.format("output") + rules)
        rules = f"add rule ip wall input ip saddr {INNER_BACK} accept"
        self.run("server", "nft", "add table ip wall; " + chain.format("input") + rules)

    def inside(self, name):
        """Return the prefix that runs a command in a namespace."""
        return ("ip", "netns", "exec", self.names[name])

    def run(self, name, *words):
        """Run a command in a namespace."""
        subprocess.run([*self.inside(name), *words], check=True, capture_output=True, timeout=20)

    def reach(self, *places):
        """Return for each (host, port) the machines that can connect to it.

        All are tried at once, because each failure takes a second.
        """
        words = (sys.executable, "-ISc", REACH)
        tries = [
            {
                name: subprocess.Popen(
                    [*self.inside(name), *words, host, str(port)], stderr=subprocess.DEVNULL
                )
                for name in CLIENT_SIDE
            }
            for host, port in places
        ]
        return [{name for name, tried in each.items() if tried.wait(30) == 0} for each in tries]

    def remove(self):
        """Remove the namespaces."""
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def walls(site):
    """Firewalls; they and the nodes behind them are removed after the test."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    made = Walls()
    try:
        made.build()
        yield made
    finally:
        site.close()
        made.remove()


def relay(site, walls, name, listen, upstream):
    """Start a relay on a router; returns it and the address it prints for clients."""
    words = ("--role", "relay", "--listen", listen, upstream.fsl)
    process = site.start(*words, inside=walls.names[name])
    line = process.wait_for("--role client")
    return process, addresses.parse("fsl://" + line.split("fsl://")[1].rstrip("'"))


def test_sites_behind_firewalls_train_through_relays(walls, site):
    """An encrypted run ends with nothing lost, through one relay and through two in a row.

    Without the relays the sites cannot connect.
    """
    clients = {"a": "far", "b": "near"}
    keys = {name: KeysFolder(site.folder / f"keys-{name}") for name in ("ps", *clients)}
    public = {name: folder.make_pair().public for name, folder in keys.items()}
    for name in clients:
        keys["ps"].change_allowed(
            lambda before, name=name: before.with_entry(Entry(public[name], name))
        )
    chosen = {
        "sync.every_s": 1,
        "sync.clients": 2,
        "sync.min_clients": 2,
        "run.rounds": 2,
        "session.heartbeat_every_s": 0.5,
    }
    flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    words = ("--role", "ps", "--run-dir", site.run_dir, "--keys", keys["ps"].path, *flags)
    server = site.start(*words, f"{SERVER}:0", inside=walls.names["server"])
    port = int(server.wait_for("listening at").split("tcp://")[1].split(",")[0].rpartition(":")[2])
    assert walls.reach((SERVER, port)) == [set(CLIENT_SIDE)], (
        "without the firewalls every machine connects"
    )
    walls.close()

    upstream = addresses.Address(SERVER, port, public["ps"])
    inner, place = relay(site, walls, "inner", "0.0.0.0:0", upstream)
    outer, far_entry = relay(site, walls, "outer", f"{OUTER}:0", attrs.evolve(place, host=INNER))
    near_entry = attrs.evolve(place, host=NEAR_INNER)
    assert far_entry.host == OUTER
    assert far_entry.key == near_entry.key == public["ps"], (
        "the key is the server's: relays have none"
    )
    found = walls.reach((SERVER, port), (INNER, place.port), (OUTER, far_entry.port))
    assert found == [{"inner"}, {"outer", "inner"}, {"far", "outer", "inner"}]

    task = f"{site.folder / 'task.py'}:train"
    started = []
    for name, at in (("a", far_entry), ("b", near_entry)):
        words = ("--name", name, "--task", task, "--keys", keys[name].path, at.fsl)
        started.append(site.start("--role", "client", *words, inside=walls.names[clients[name]]))
    assert server.end() == 0
    assert [client.end() for client in started] == [0, 0]
    found = site.ledger("version")
    assert found[-1]["version"] >= 2
    names = {one["key"].split("/")[0] for version in found for one in version["merged"]}
    assert names == set(clients)
    audit = audit_run(site.run_dir)
    assert not audit.lost
    assert not audit.doubled
    for process in (outer, inner):
        process.signal(signal.SIGTERM)
    assert [process.end() for process in (outer, inner)] == [64, 64]

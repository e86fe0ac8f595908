"""A site that reaches one machine only, which alone reaches the server: real firewalls between real network namespaces, and a relay."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from fsl_async import address as addresses
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.ledger_audit import audit_run

pytestmark = pytest.mark.slow

SITE, ROUTER, SERVER = "10.93.1.2", ("10.93.1.1", "10.93.2.1"), "10.93.2.2"
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"


def missing():
    """Why there can be no firewall here, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root: network namespaces"
    for name in ("ip", "nft"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "nft", "add", "table", "inet", "x"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "this kernel has no nftables or no namespaces"


class Walls:
    """Three namespaces in a row: site, router, server. The router forwards until `close` forbids it."""

    def __init__(self):
        self.names = {what: f"fsl-wall-{os.getpid()}-{what}" for what in ("s", "r", "p")}

    def ip(self, *words):
        """Run `ip`."""
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    def build(self):
        """Make them."""
        for name in self.names.values():
            self.ip("netns", "add", name)
        s, r, p = self.names.values()
        for near, near_ip, far, far_ip, device in (
            (r, ROUTER[0], s, SITE, "site"),
            (r, ROUTER[1], p, SERVER, "srv"),
        ):
            self.ip(
                "link",
                "add",
                device,
                "netns",
                near,
                "type",
                "veth",
                "peer",
                "name",
                "wire",
                "netns",
                far,
            )
            for where, ip, link in ((near, near_ip, device), (far, far_ip, "wire")):
                self.ip("-n", where, "addr", "add", f"{ip}/24", "dev", link)
                self.ip("-n", where, "link", "set", link, "up")
            self.ip("-n", far, "route", "add", "default", "via", near_ip)
        for name in self.names.values():
            self.ip("-n", name, "link", "set", "lo", "up")
        self.run("r", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def close(self):
        """The router's machine passes nothing on any more, and the site may reach nothing else."""
        self.run(
            "r",
            "nft",
            "add table ip wall; add chain ip wall f { type filter hook forward priority 0; policy drop; }",
        )
        rules = f"add table ip wall; add chain ip wall o {{ type filter hook output priority 0; policy drop; }}; add rule ip wall o ip daddr {ROUTER[0]} accept"
        self.run("s", "nft", rules)

    def inside(self, what):
        """Words that put a command behind a wall."""
        return ("ip", "netns", "exec", self.names[what])

    def run(self, what, *words):
        """Run a command there."""
        return subprocess.run(
            [*self.inside(what), *words], check=True, capture_output=True, timeout=20
        )

    def reaches(self, what, host, port):
        """Whether a connection from there comes about."""
        done = subprocess.run(
            [*self.inside(what), sys.executable, "-c", REACH, host, str(port)],
            capture_output=True,
            check=False,
            timeout=30,
        )
        return done.returncode == 0

    def remove(self):
        """Leave nothing."""
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def walls(site):
    """Walls that are gone after the test, as the nodes inside are."""
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


def test_a_site_behind_a_firewall_trains_through_a_relay(walls, site):
    """Encrypted, to the end, with nothing lost; and without the relay there is no way at all."""
    keys = {name: KeysFolder(site.folder / f"keys-{name}") for name in ("ps", "a", "b")}
    public = {name: folder.make_pair().public for name, folder in keys.items()}
    for name in ("a", "b"):
        keys["ps"].change_allowed(
            lambda before, name=name: before.with_entry(Entry(public[name], name))
        )
    words = [
        "--set",
        "sync.every_s=1",
        "--set",
        "sync.clients=2",
        "--set",
        "run.rounds=2",
        "--set",
        "session.heartbeat_every_s=0.5",
    ]
    server = site.start(
        "--role", "ps", "--run-dir", site.run_dir, "--keys", keys["ps"].path, *words, f"{SERVER}:0", inside=walls.inside("p")
    )  # fmt: skip
    port = int(server.wait_for("listening at").split("tcp://")[1].split(",")[0].rpartition(":")[2])
    assert walls.reaches("s", SERVER, port), (
        "the walls stand open: else what follows proves nothing"
    )
    walls.close()
    assert not walls.reaches("s", SERVER, port)
    assert walls.reaches("r", SERVER, port)
    upstream = addresses.Address(SERVER, port, public["ps"]).fsl
    relay = site.start(
        "--role", "relay", "--listen", f"{ROUTER[0]}:0", upstream, inside=walls.inside("r")
    )
    entry = "fsl://" + relay.wait_for("--role client").split("fsl://")[1].rstrip("'")
    assert entry.startswith(f"fsl://{ROUTER[0]}:")
    task = f"{site.folder / 'task.py'}:train"
    clients = [
        site.start("--role", "client", "--name", name, "--task", task, "--keys", keys[name].path, entry, inside=walls.inside("s"))
        for name in ("a", "b")
    ]  # fmt: skip
    assert server.end() == 0
    assert [client.end() for client in clients] == [0, 0]
    found = site.ledger("version")
    assert found[-1]["version"] >= 2
    names = {one["key"].split("/")[0] for version in found for one in version["merged"]}
    assert names == {"a", "b"}
    audit = audit_run(site.run_dir)
    assert not audit.lost
    assert not audit.doubled
    relay.signal(signal.SIGTERM)
    assert relay.end() == 64

"""The veth backend, where this machine's kernel lacks sch_netem: in the router VM, which has it."""

import re

import pytest
from netlab import host, machine, plan, records, veth
from netlab.profiles import profile


def recorded(monkeypatch, action):
    """Return the shell commands that an action would run, in order."""
    lines = []

    def take(argv, *, text=None, **_):
        given = "" if text is None else f"printf '{text.replace(chr(10), chr(92) + 'n')}' | "
        lines.append(f"{given}/sbin/{' '.join(argv)}")
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(host, "run", take)
        action()
    return lines


def test_its_commands_make_a_link(built, monkeypatch):
    """Namespaces inside the VM, a veth pair, netem on both ends.

    The kernel takes every line, and a packet takes twice the delay.
    """
    if built.backend != machine.Machine.name:
        pytest.skip("this machine's own kernel has sch_netem, and all other tests use it")
    inner = plan.make("inner", ["a", "b"])
    backend = veth.Veth(inner)

    def make():
        host.ip_batch(f"netns add {site.namespace}" for site in inner.sites.values())
        backend.build({"a:b": profile("wireless")})
        for site in inner.sites.values():
            host.ip_batch(plan.site_lines(inner, site), site.namespace)
        backend.apply(inner.links["a:b"], profile("transatlantic"), cut=True)
        backend.apply(inner.links["a:b"], profile("transatlantic"), cut=False)

    with machine.Console(records.folder(built.name) / machine.CONSOLE) as console:
        for line in recorded(monkeypatch, make):
            console.command(line)
        site = inner.site("a").namespace
        address = inner.site("b").address
        said = console.command(f"/sbin/ip netns exec {site} /bin/busybox ping -c 3 {address}")
        shown = console.command(f"/sbin/ip -netns {site} -d link show dev link0")
        for one in inner.sites.values():
            console.command(f"/sbin/ip netns delete {one.namespace}")
    fastest = min(float(found) for found in re.findall(r"time=([\d.]+) ms", said))
    assert 89.5 < fastest < 150
    assert "gso_max_segs 1 " in shown  # loss is of packets, not of 64 KB

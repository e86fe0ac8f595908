"""Plans a laboratory: its links, names, addresses and the lines for `ip -batch`. Pure.

Every site has one address, on its loopback interface, whatever the number of its links. A link is a
pair of devices, one in the namespace of each of its two sites, without addresses of their own: each
end has a route to the other site's address and a permanent neighbor entry, so that no ARP is lost
on a lossy link, and a cut link is silent as a cut cable far away is (an unanswered ARP request
would tell the sender within seconds that the host is unreachable).

Sites do not forward. A site reaches only those that it has a link with: a client behind a relay has
a link to the relay only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import frozen

from fsl_async.errors import UsageError

PREFIX = "fsl"
MOST_SITES = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_LAB = re.compile(r"[a-z0-9][a-z0-9-]{0,23}\Z")
CONGESTION = "cubic"


@frozen
class Site:
    """A network namespace."""

    name: str
    namespace: str
    address: str


@frozen
class End:
    """One end of a link: the device in the namespace of `site`, and the site at the other end."""

    site: Site
    peer: Site
    device: str
    mac: str
    peer_mac: str


@frozen
class Link:
    """Two sites with a cable between them; `index` counts from 0."""

    name: str
    index: int
    ends: tuple[End, End]


@frozen
class Plan:
    """A laboratory before it is built."""

    name: str
    sites: Mapping[str, Site]
    links: Mapping[str, Link]
    congestion: str = CONGESTION

    def site(self, name: str) -> Site:
        """A site; raises UsageError with the names that there are."""
        found = self.sites.get(name)
        if found is None:
            raise UsageError(f"no site {name[:80]!r}; sites: {', '.join(self.sites)}")
        return found

    def chosen(self, word: str) -> list[Link]:
        """The links that a word means: `all`, a link's name in either order, or a site with one.

        Raises UsageError with the links that there are.
        """
        if word == "all":
            return list(self.links.values())
        left, _, right = word.partition(":")
        found = self.links.get(word) or self.links.get(f"{right}:{left}")
        if found is not None:
            return [found]
        own = [link for link in self.links.values() if word in names(link)]
        if len(own) == 1:
            return own
        if own:
            there = ", ".join(link.name for link in own)
            raise UsageError(f"{word} has {len(own)} links; say which: {there}, or all")
        raise UsageError(f"no link {word[:80]!r}; links: {', '.join(self.links)}, or all")

    def between(self, one: str, other: str) -> Link:
        """The link between two sites; raises UsageError when there is none."""
        return self.chosen(f"{self.site(one).name}:{self.site(other).name}")[0]


def names(link: Link) -> tuple[str, str]:
    """The two sites of a link."""
    return link.ends[0].site.name, link.ends[1].site.name


def is_name(name: str) -> bool:
    """Whether it may be a laboratory's."""
    return _LAB.match(name) is not None


def checked(name: str) -> str:
    """Return a laboratory's name. Raises UsageError for any other.

    It is also a folder's, and what that holds is removed with it.
    """
    if not is_name(name):
        raise UsageError(
            f"{name[:40]!r} does not name a laboratory: use 1 to 24 of a-z, 0-9 and '-'"
        )
    return name


def star(sites: Sequence[str]) -> list[tuple[str, str]]:
    """The first site has a link with each of the others."""
    return [(sites[0], other) for other in sites[1:]]


def make(
    name: str,
    sites: Sequence[str],
    pairs: Sequence[tuple[str, str]] | None = None,
    congestion: str = CONGESTION,
) -> Plan:
    """Plan a laboratory; `pairs` are its links, by default a star around the first site.

    Raises UsageError.
    """
    checked(name)
    _check(sites)
    made = {
        site: Site(site, f"{PREFIX}-{name}-{site}", f"10.77.0.{number}")
        for number, site in enumerate(sites, 1)
    }
    links: dict[str, Link] = {}
    for index, (left, right) in enumerate(star(sites) if pairs is None else pairs):
        for site in (left, right):
            if site not in made:
                raise UsageError(f"a link to {site[:80]!r}, which is no site")
        if left == right or f"{right}:{left}" in links or f"{left}:{right}" in links:
            raise UsageError(f"{left}:{right}: a link joins two sites, and two sites once")
        links[f"{left}:{right}"] = _link(index, made[left], made[right])
    if not links:
        raise UsageError("a laboratory needs a link")
    return Plan(name, made, links, congestion)


def _check(sites: Sequence[str]) -> None:
    if not 2 <= len(sites) <= MOST_SITES:
        raise UsageError(f"a laboratory has 2 to {MOST_SITES} sites, not {len(sites)}")
    for site in sites:
        if not _NAME.match(site) or site == "all":
            raise UsageError(f"{site[:80]!r} does not name a site: use letters, digits, . _ -")
    if len(set(sites)) < len(sites):
        raise UsageError("two sites have the same name")


def _link(index: int, left: Site, right: Site) -> Link:
    device = f"link{index}"
    macs = [f"02:f5:1a:{index >> 8:02x}:{index & 255:02x}:0{end}" for end in (1, 2)]
    return Link(
        f"{left.name}:{right.name}",
        index,
        (
            End(left, right, device, macs[0], macs[1]),
            End(right, left, device, macs[1], macs[0]),
        ),
    )


def ends_at(plan: Plan, site: Site) -> list[End]:
    """The ends of links in a site."""
    return [end for link in plan.links.values() for end in link.ends if end.site == site]


def site_lines(plan: Plan, site: Site) -> list[str]:
    """Return the lines of `ip -batch` for a site's namespace once its devices exist."""
    lines = ["link set dev lo up", f"address replace {site.address}/32 dev lo"]
    for end in ends_at(plan, site):
        lines += [
            f"link set dev {end.device} address {end.mac} mtu 1500 txqueuelen 1000 up",
            (
                f"neighbor replace {end.peer.address} lladdr {end.peer_mac} dev {end.device}"
                " nud permanent"
            ),
            f"route replace {end.peer.address}/32 dev {end.device} src {site.address}",
        ]
    return lines


def site_settings(plan: Plan) -> dict[str, str]:
    """Files below /proc/sys/net and what is written into them, in every namespace."""
    return {
        "ipv4/tcp_congestion_control": plan.congestion,
        "ipv4/tcp_no_metrics_save": "1",  # one connection must not learn from the one before
        "ipv4/ip_forward": "0",
        "ipv4/conf/all/rp_filter": "0",
        "ipv4/conf/default/rp_filter": "0",
        "ipv6/conf/all/disable_ipv6": "1",
    }

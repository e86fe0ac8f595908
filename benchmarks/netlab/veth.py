"""Backends of veth devices: a link is a pair of them, one in each namespace.

`Veth` is for kernels with sch_netem, which is on the egress of both. `Unshaped` has no netem, so it
needs nothing but namespaces.
"""

from __future__ import annotations

from collections.abc import Mapping

from netlab import host
from netlab.netem import arguments
from netlab.plan import Link, Plan
from netlab.profiles import LinkSettings


class Veth:
    """The links of one laboratory."""

    name = "veth"

    def __init__(self, lab: Plan) -> None:
        self._plan = lab

    def build(self, settings: Mapping[str, LinkSettings]) -> int:
        """Make all links; returns 0, because no process belongs to them. Raises LabError."""
        host.ip_batch(
            f"link add name {left.device} netns {left.site.namespace} type veth"
            f" peer name {right.device} netns {right.site.namespace}"
            for left, right in (link.ends for link in self._plan.links.values())
        )
        for link in self._plan.links.values():
            self.apply(link, settings[link.name], cut=False)
        return 0

    def apply(self, link: Link, settings: LinkSettings, *, cut: bool) -> None:
        """Set both directions of a link."""
        for end, way in zip(link.ends, (settings.down, settings.up), strict=True):
            namespace = end.site.namespace
            # netem is here, before the device would split what the stack hands over; so the stack
            # must not hand over more than a packet.
            packets = 65535 if settings.keeps_packets else 1
            lines = [f"link set dev {end.device} gso_max_segs {packets}", host.ASK_AGAIN]
            host.ip_batch(lines, namespace)
            words = arguments(way, cut=cut)
            host.run(
                ["tc", "-netns", namespace, "qdisc", "replace", "dev", end.device, "root", *words]
            )

    def remove(self) -> None:
        """Do nothing: a pair is removed with the namespaces of its ends."""


class Unshaped(Veth):
    """Links that can be cut and have no other setting: no delay, no loss, no rate."""

    name = "veth without shaping"

    def apply(self, link: Link, settings: LinkSettings, *, cut: bool) -> None:
        """Cut a link or heal it: a queue with room for no packet drops all of them."""
        for end in link.ends:
            which = ["dev", end.device, "root", "pfifo", "limit", "0" if cut else "1000"]
            host.run(["tc", "-netns", end.site.namespace, "qdisc", "replace", *which])

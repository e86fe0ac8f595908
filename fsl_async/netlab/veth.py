"""Backend for kernels with sch_netem: a link is a pair of veth devices, one in each namespace, with netem on the egress of both."""

from __future__ import annotations

from collections.abc import Mapping

from fsl_async.netlab import host, plan
from fsl_async.netlab.netem import arguments
from fsl_async.netlab.plan import Link, Plan
from fsl_async.netlab.profiles import LinkSettings

NAME = "veth"


class Veth:
    """The links of one laboratory."""

    name = NAME

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
        for end in link.ends:
            namespace = end.site.namespace
            host.ip_batch(plan.segment_lines(end, whole=settings.keeps_packets), namespace)
            words = arguments(settings, cut=cut)
            host.run(
                ["tc", "-netns", namespace, "qdisc", "replace", "dev", end.device, "root", *words]
            )

    def queues(self, link: Link) -> str:
        """What `tc -s qdisc` says about both directions, for people who look for a fault."""
        return "".join(
            host.run(["tc", "-netns", end.site.namespace, "-s", "qdisc", "show", "dev", end.device])
            for end in link.ends
        )

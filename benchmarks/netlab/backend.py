"""What carries packets between the sites, and the one place where it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from netlab import host, machine
from netlab.machine import Machine
from netlab.plan import Link, Plan
from netlab.profiles import LinkSettings
from netlab.veth import Unshaped, Veth


class Backend(Protocol):
    """The links of one laboratory. Raises LabError."""

    name: str
    """What `netlab status` calls it."""

    def __init__(self, lab: Plan) -> None: ...

    def build(self, settings: Mapping[str, LinkSettings]) -> int:
        """Make the links; returns the id of the process that they live in, 0 for none."""

    def apply(self, link: Link, settings: LinkSettings, *, cut: bool) -> None:
        """Set both directions of a link."""

    def remove(self) -> None:
        """Remove what does not go with the sites' namespaces; harmless when it is gone."""


def choose(name: str = "") -> type[Backend]:
    """The backend of this name; without one, that which this machine can have.

    Pairs of veth with netem where the kernel has sch_netem, else a router VM whose kernel has it.
    Raises MissingError with what is missing and what to do.
    """
    known: dict[str, type[Backend]] = {one.name: one for one in (Veth, Machine, Unshaped)}
    if name:
        return known[name]
    host.require()
    if host.has_netem():
        return Veth
    machine.require()
    return Machine

"""Chooses the backend that carries packets between the sites."""

from __future__ import annotations

from netlab import host, machine
from netlab.machine import Machine
from netlab.veth import Unshaped, Veth

Backend = Veth | Machine


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

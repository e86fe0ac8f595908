"""Where the nodes of a comparison run, and what lies between them: the one seam for networks.

    Loopback     every node is a thread of this process, nothing between them
    Lagging      the same, with a `LagLink` in front of each server: "--net RATE,DELAY"

A place of another kind (a network laboratory) gives `prefix` a command that enters the node's site; the node is then a process of its
own (`fsl_async.compare.nodes`).
"""

from __future__ import annotations

from collections.abc import Callable

from fsl_async.address import parse
from fsl_async.compare.lag_link import LagLink
from fsl_async.errors import UsageError
from fsl_async.plan.link import LinkSpec, parse_link

ANY = "tcp://127.0.0.1:0"


class Loopback:
    """Everything here. Made anew for each run, and closed after it."""

    words = "loopback, nothing between the nodes"

    def prefix(self, node: str) -> tuple[str, ...] | None:
        """The command that a node's is put behind, for one with a process of its own; None: it is a thread of this process."""
        return None

    def listen(self) -> dict[str, str]:
        """Where the servers listen ("ps", "split"), and where clients reach the split server ("reach"; "": where it listens)."""
        return {"ps": ANY, "split": ANY, "reach": ""}

    def listening(self, role: str, address: str) -> str:
        """A server ("ps" or "server") listens at `address`; returns where clients reach it."""
        return address

    def close(self) -> None:
        """The run is over."""


class Lagging(Loopback):
    """A long line to both servers, in this process."""

    def __init__(self, link: LinkSpec) -> None:
        self._links = {role: LagLink(link) for role in ("ps", "server")}
        rate, delay = link.bits_per_s / 1e6, link.delay_s * 1e3
        self.words = f"a proxy in this process: {rate:g} Mbit/s for each connection, {delay:g} ms each way, no loss"

    def listen(self) -> dict[str, str]:
        """Clients reach the split server by its proxy."""
        return {"ps": ANY, "split": ANY, "reach": self._links["server"].address}

    def listening(self, role: str, address: str) -> str:
        """Point the proxy to it."""
        found = parse(address)
        link = self._links[role]
        link.target = (found.host, found.port)
        return link.address

    def close(self) -> None:
        """Cut the lines."""
        for link in self._links.values():
            link.close()


def places_of(net: str | None) -> Callable[[], Loopback]:
    """What `--net` says, as a maker of places. Raises UsageError for what is no link."""
    if net is None:
        return Loopback
    try:
        link = parse_link(net)
    except UsageError:
        raise UsageError(
            f"--net {net[:80]!r}: write RATE,DELAY (one way) like 200mbit,45ms, for a line that a proxy in this process makes"
        ) from None
    return lambda: Lagging(link)

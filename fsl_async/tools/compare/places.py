"""Where the nodes of a comparison run, and the links between them.

Loopback     every node is on this machine, nothing between them
Lagging      the same, with a `Proxy` in front of each server: "--net RATE,DELAY"
Sites        the network laboratory: a site for the servers and one for each client,
             "--net PROFILE[:KEY=VALUE...]"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from fsl_async.config.address import parse
from fsl_async.errors import UsageError
from fsl_async.plan.link import LinkSpec, parse_link
from fsl_async.tools.clone import need_benchmarks
from fsl_async.tools.proxy import Proxy

ANY = "tcp://127.0.0.1:0"
SERVERS = "server"
"""The servers' node; clients have their own names."""


class Loopback:
    """All nodes on this machine. Made for each run, and closed after it."""

    def prefix(self, node: str) -> tuple[str, ...]:
        """Return the words before a node's command, which enter its site."""
        return ()

    def listen(self) -> dict[str, str]:
        """Where the servers listen ("ps", "split"), and clients reach the split server ("reach").

        "reach" is empty where they reach it where it listens.
        """
        return {"ps": ANY, "split": ANY, "reach": ""}

    def listening(self, role: str, address: str) -> str:
        """A server ("ps" or "server") listens at `address`; returns where clients reach it."""
        return address

    def close(self) -> None:
        """Release what the run used."""


class Lagging(Loopback):
    """A slow link to both servers, by proxies in this process."""

    def __init__(self, link: LinkSpec) -> None:
        self._links = {role: Proxy(link=link) for role in ("ps", "server")}

    def listen(self) -> dict[str, str]:
        """Return the addresses; clients reach the split server by its proxy."""
        return {"ps": ANY, "split": ANY, "reach": self._links["server"].address}

    def listening(self, role: str, address: str) -> str:
        """Point the parameter server's proxy to `address`."""
        found = parse(address)
        link = self._links[role]
        link.target = (found.host, found.port)
        return link.address

    def close(self) -> None:
        """Close the proxies."""
        for link in self._links.values():
            link.close()


class Sites(Loopback):
    """A laboratory with the servers in its middle. Raises LabError where there can be none."""

    def __init__(self, profile: str, clients: Sequence[str], changes: Sequence[str] = ()) -> None:
        from netlab.laboratory import Laboratory

        self._lab = Laboratory([SERVERS, *clients], profile=profile)
        self._lab.up()
        if changes:
            self._lab.set("all", *changes)

    def prefix(self, node: str) -> tuple[str, ...]:
        """Enter the node's site."""
        return self._lab.command(node, ())

    def listen(self) -> dict[str, str]:
        """Return the addresses in the site in the middle, which has no other program."""
        host = self._lab.address(SERVERS)
        return {"ps": f"tcp://{host}:7100", "split": f"tcp://{host}:7101", "reach": ""}

    def close(self) -> None:
        """Take the laboratory down."""
        self._lab.down()


@frozen
class Net:
    """A description of the links between the nodes, and a function that makes them for a run."""

    words: str
    make: Callable[[], Loopback]


def net_of(text: str | None, clients: Sequence[str] = ()) -> Net:
    """Read `--net`.

    Raises UsageError for what is neither link nor profile, LabError where there can be no
    laboratory.
    """
    if text is None:
        return Net("loopback, nothing between the nodes", Loopback)
    try:
        link = parse_link(text)
    except UsageError:
        return _laboratory(text, clients)
    rate, delay = link.bits_per_s / 1e6, link.delay_s * 1e3
    words = (
        f"a proxy in this process: {rate:g} Mbit/s for each connection, {delay:g} ms each way,"
        " no loss"
    )
    return Net(words, lambda: Lagging(link))


def _laboratory(text: str, clients: Sequence[str]) -> Net:
    """Read PROFILE[:KEY=VALUE...]."""
    need_benchmarks(f"--net {text[:80]}, which is not RATE,DELAY like 200mbit,45ms,")
    from netlab import profiles
    from netlab.laboratory import which

    profile, *changes = text.split(":")
    settings = profiles.profiles().get(profile)
    if settings is None:
        raise UsageError(
            f"--net {text[:80]!r}: a profile of the network laboratory"
            f" ({', '.join(profiles.profiles())}), or RATE,DELAY (one way) like 200mbit,45ms for a"
            " line that a proxy in this process makes"
        )
    for change in changes:
        settings = profiles.changed(settings, change)
    words = f"network laboratory ({which()}), {profile} links: {profiles.words(settings)}"
    return Net(words, lambda: Sites(profile, clients, changes))

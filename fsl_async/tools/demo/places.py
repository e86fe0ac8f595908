"""Where the nodes of a run are, and what lies between clients and servers.

Places       every node is on this machine, nothing between them
Linked       the same, with a `Proxy` in front of each client, which `fsl-node chaos` can cut
Lagging      the same, with a `Proxy` in front of each server: "--net RATE,DELAY"
Sites        the network laboratory: a site for the servers and one for each client,
             "--net PROFILE[:KEY=VALUE...]"

Places are made for one run, and closed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from fsl_async.config.address import parse
from fsl_async.errors import UsageError, need_benchmarks
from fsl_async.plan.link import LinkSpec, parse_link
from fsl_async.tools.proxy import Proxy

if TYPE_CHECKING:
    from netlab.laboratory import Laboratory

SERVER = "server"
"""The node of the servers; clients have their own names."""
LOOPBACK = "127.0.0.1"


class Places:
    """All nodes on this machine, with nothing between them."""

    host: str = LOOPBACK
    """Address of the servers."""
    split_server: str = ""
    """Where clients reach the split server; empty: where it listens."""

    @property
    def listen(self) -> str:
        """A free port of the host where servers run."""
        return f"tcp://{self.host}:0"

    @property
    def is_here(self) -> bool:
        """Whether all nodes are on this machine."""
        return self.host == LOOPBACK

    def command(self, node: str) -> tuple[str, ...]:
        """Return the words before a node's command, which enter its site."""
        return ()

    def listening(self, role: str, address: str) -> str:
        """A server ("ps" or "server") listens at `address`; returns where clients reach it."""
        return address

    def dialed(self, client: str, address: str) -> str:
        """Return the address that a client dials to reach a server."""
        return address

    def close(self) -> None:
        """Release what the run used."""


HERE = Places()


class Linked(Places):
    """A link to each client that follows a file of its name in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._links: list[Proxy] = []

    def dialed(self, client: str, address: str) -> str:
        """Put a proxy in front of the client, whose link is open."""
        self._links.append(Proxy(_target(address), follow=self._folder / client))
        return self._links[-1].address

    def close(self) -> None:
        """Close the proxies."""
        for link in self._links:
            link.close()


class Lagging(Places):
    """A slow link to both servers, by proxies in this process."""

    def __init__(self, link: LinkSpec) -> None:
        self._links = {role: Proxy(link=link) for role in ("ps", "server")}
        self.split_server = self._links["server"].address

    def listening(self, role: str, address: str) -> str:
        """Point the server's proxy to `address`."""
        self._links[role].target = _target(address)
        return self._links[role].address

    def close(self) -> None:
        """Close the proxies."""
        for link in self._links.values():
            link.close()


class Sites(Places):
    """A laboratory that is up, with the servers in its middle."""

    def __init__(self, lab: Laboratory) -> None:
        self.lab = lab
        self.host = lab.address(SERVER)

    @classmethod
    def opened(cls, profile: str, clients: Sequence[str]) -> Sites:
        """Open a laboratory with links PROFILE[:KEY=VALUE...]. Raises LabError where there can be
        none.
        """
        from netlab.laboratory import Laboratory

        lab = Laboratory([SERVER, *clients], profile=profile)
        lab.up()
        try:
            return cls(lab)
        except BaseException:
            lab.down()
            raise

    def command(self, node: str) -> tuple[str, ...]:
        """Enter the node's site."""
        return self.lab.command(node, ())

    def close(self) -> None:
        """Take the laboratory down."""
        self.lab.down()


def _target(address: str) -> tuple[str, int]:
    found = parse(address)
    return found.host, found.port


@frozen
class Net:
    """A description of the links between the nodes, and a function that makes them for a run."""

    words: str
    make: Callable[[], Places]


def net_of(text: str | None, clients: Sequence[str] = ()) -> Net:
    """Read `--net`.

    Raises UsageError for what is neither link nor profile, LabError where there can be no
    laboratory.
    """
    if text is None:
        return Net("loopback, nothing between the nodes", Places)
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

    profile = text.partition(":")[0]
    if profile not in profiles.profiles():
        raise UsageError(
            f"--net {text[:80]!r}: a profile of the network laboratory"
            f" ({', '.join(profiles.profiles())}), or RATE,DELAY (one way) like 200mbit,45ms for a"
            " line that a proxy in this process makes"
        )
    described = profiles.words(profiles.profile(text))
    words = f"network laboratory ({which()}), {profile} links: {described}"
    return Net(words, lambda: Sites.opened(text, clients))

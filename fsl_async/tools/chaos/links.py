"""Cuts the links of clients, or makes them slow: in a network laboratory, or by a proxy.

A client is in a laboratory when its process is in the network namespace of one of its sites, which
is looked up in /proc. Elsewhere, a client that was started behind a `Proxy` (`demo --links`) has a
file RUN/links/NAME, which that proxy follows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from fsl_async.tools.chaos.targets import Node, Run
from fsl_async.tools.clone import has_benchmarks

if TYPE_CHECKING:
    from netlab.laboratory import Laboratory

FOLDER = "links"
SLOW_BYTES_PER_S = 20_000.0
SLOW_RATE = "160kbit"


class LinkOf(Protocol):
    """One client's link."""

    def cut(self) -> None:
        """Nothing passes any more."""

    def slow(self) -> None:
        """Little passes."""

    def restore(self) -> None:
        """As it was."""


@frozen
class FileLink:
    """The link of a proxy, controlled by a file."""

    path: Path

    def _say(self, text: str) -> None:
        partial = self.path.with_name(f".{self.path.name}.part")
        partial.write_text(text)
        partial.rename(self.path)

    def cut(self) -> None:
        """Nothing passes any more."""
        self._say("cut")

    def slow(self) -> None:
        """Little passes."""
        self._say(f"slow {SLOW_BYTES_PER_S:g}")

    def restore(self) -> None:
        """As it was."""
        self._say("open")


@frozen
class SiteLink:
    """The link of a laboratory's site; `was` is its profile, or else its rate, before the fault."""

    lab: Laboratory
    site: str
    was: str

    def cut(self) -> None:
        """Nothing passes any more."""
        self.lab.cut(self.site)

    def slow(self) -> None:
        """Little passes."""
        self.lab.set(self.site, f"rate={SLOW_RATE}")

    def restore(self) -> None:
        """As it was."""
        self.lab.set(self.site, "heal", self.was)


def link_of(run: Run, node: Node) -> LinkOf | None:
    """Return the client's link, to cut or slow it; None when there is none."""
    path = run.run_dir / FOLDER / node.name
    if path.exists():
        return FileLink(path)
    if not has_benchmarks():
        return None
    from netlab.laboratory import site_of

    found = site_of(node.pid)
    if found is None:
        return None
    lab, site = found
    state = next(one for one in lab.links.values() if site in {one.left, one.right})
    return SiteLink(lab, site, state.profile or f"rate={state.settings.rate_mbit:g}mbit")

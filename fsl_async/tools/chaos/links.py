"""Cuts the links of clients, or makes them slow: in a network laboratory, or by a proxy.

A client is in a laboratory when its process is in the network namespace of one of its sites, which
is looked up in /proc. Elsewhere, a client that was started behind a `Proxy` (`demo --links`) has a
file RUN/links/NAME, which that proxy follows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsl_async.files.private_files import replace_bytes
from fsl_async.tools.chaos.schedule import PARTITION, SLOW
from fsl_async.tools.chaos.targets import Node, Run
from fsl_async.tools.clone import has_benchmarks

if TYPE_CHECKING:
    from netlab.laboratory import Laboratory

FOLDER = "links"
SLOW_BYTES_PER_S = 20_000.0
SLOW_RATE = "160kbit"
OPEN = "open"

Link = Callable[[str], None]
"""Changes a client's link: PARTITION lets nothing pass, SLOW little; OPEN removes the fault."""


def file_link(path: Path) -> Link:
    """The link of a proxy, controlled by a file."""
    words = {PARTITION: "cut", SLOW: f"slow {SLOW_BYTES_PER_S:g}", OPEN: "open"}

    return lambda state: replace_bytes(path, words[state].encode())


def site_link(lab: Laboratory, site: str, was: str) -> Link:
    """The link of a laboratory's site. was: its profile, or else its rate, before the fault."""
    words = {PARTITION: ("cut",), SLOW: (f"rate={SLOW_RATE}",), OPEN: ("heal", was)}
    return lambda state: lab.set(site, *words[state])


def link_of(run: Run, node: Node) -> Link | None:
    """Return the client's link; None when there is none of its own."""
    path = run.run_dir / FOLDER / node.name
    if path.exists():
        return file_link(path)
    if not has_benchmarks():
        return None
    from netlab.laboratory import site_of

    found = site_of(node.pid)
    if found is None:
        return None
    lab, site = found
    state = next(one for one in lab.links.values() if site in {one.left, one.right})
    return site_link(lab, site, state.profile or f"rate={state.settings.rate_mbit:g}mbit")

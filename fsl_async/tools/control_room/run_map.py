"""The map of a run as SVG: servers, their sites, the links between them, groups and relays. Pure.

Each server is a box; its sites stand in one column (narrow) or in columns on both sides, so that
names never overlap, whatever their number. A link is as wide as what went over it: 1 px, and one
more for each factor of ten from 100 kB on. Colors are classes of the style sheet. Every text is
escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from fsl_async.roles.phrasing import megabytes

ROW = 18
"""Height of a site, px."""
TOP = 14
HUB_WIDTH, HUB_HEIGHT = 176, 64
NARROW = 640
"""Below this width all sites stand in one column."""
MAX_NAME = 26
MIN_WIDTH, MAX_WIDTH = 300, 2000
_CHARACTER = 7.2


def draw(nodes: Sequence[Mapping[str, Any]], width: int) -> str:
    """The SVG of nodes as `snapshot.node` makes them; `width` in px."""
    width = max(MIN_WIDTH, min(MAX_WIDTH, width))
    parts: list[str] = []
    rings: list[str] = []  # below the boxes
    hubs: list[tuple[float, float]] = []
    y = float(TOP)
    for one in nodes:
        block, height, hub = _block(one, width, y)
        if hubs and one["role"] == nodes[0]["role"] == "ps":
            rings.append(_link(hubs[-1], hub, 2, "groups of one run"))
        elif hubs:
            rings.append(_link(hubs[-1], hub, 1, ""))
        hubs.append(hub)
        parts.append(block)
        y += height + ROW
    sites = sum(len(one["sites"]) for one in nodes)
    title = f"{len(nodes)} servers and {sites} sites" if len(nodes) > 1 else f"{sites} sites"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" viewBox="0 0 {width} {y:.0f}"'
        f' width="{width}" height="{y:.0f}" role="img" aria-label={quoteattr(title)}>'
        f"<title>{escape(title)}</title>{''.join(rings + parts)}</svg>"
    )


def _block(
    one: Mapping[str, Any], width: int, top: float
) -> tuple[str, float, tuple[float, float]]:
    """A server with its sites: text, height, and the middle of the server's box."""
    sites = one["sites"]
    is_narrow = width < NARROW
    columns = 1 if is_narrow else 2
    rows = math.ceil(len(sites) / columns)
    height = max(rows * ROW, HUB_HEIGHT + 8)
    hub_width = 112 if is_narrow else HUB_WIDTH
    hub_x = 4.0 if is_narrow else (width - hub_width) / 2
    middle = (hub_x + hub_width / 2, top + height / 2)
    links, labels = [], []
    for at, site in enumerate(sites):
        column, row = divmod(at, rows) if rows else (0, 0)
        y = top + height / 2 + (row - (rows - 1) / 2) * ROW
        if is_narrow:
            x, side = hub_x + hub_width + 52.0, 1
            begin = hub_x + hub_width
        else:
            side = -1 if column == 0 else 1
            x = middle[0] + side * (hub_width / 2 + min(120.0, width * 0.1))
            begin = middle[0] + side * hub_width / 2
        room = (width - x - 8) if side > 0 else x - 8
        links.append(_curve((begin, middle[1]), (x, y), site))
        labels.append(_site(site, x, y, side, room))
    box = _hub(one, hub_x, middle[1] - HUB_HEIGHT / 2, hub_width)
    return f'<g class="block">{"".join(links)}{"".join(labels)}{box}</g>', height, middle


def _curve(begin: tuple[float, float], end: tuple[float, float], site: Mapping[str, Any]) -> str:
    bend = (begin[0] + end[0]) / 2
    path = f"M{begin[0]:.1f} {begin[1]:.1f}C{bend:.1f} {begin[1]:.1f} {bend:.1f} {end[1]:.1f}"
    kind = "link" if site["here"] else "link away"
    return (
        f'<path class="{kind} {_word(site["state"])}" d="{path} {end[0]:.1f} {end[1]:.1f}"'
        f' stroke-width="{stroke(site["coded"]):.1f}"/>'
    )


def stroke(size: float) -> float:
    """Width of a link over which so many bytes went, px."""
    return 1.0 + max(0.0, math.log10(size / 1e5)) if size > 0 else 1.0


def _site(site: Mapping[str, Any], x: float, y: float, side: int, room: float) -> str:
    name, state = str(site["name"]), str(site["state"])
    sent = megabytes(site["coded"]) if site["coded"] else ""
    fits = max(4, int(room / _CHARACTER) - 2)
    shown = _short(name, min(MAX_NAME, fits))
    choices = (" · ".join(one for one in (state, sent) if one), state, "")
    words = next(one for one in choices if len(shown) + len(one) + 2 <= fits or not one)
    anchor = "start" if side > 0 else "end"
    hover = f"{name}: {state}" + (f", sent {sent}" if sent else "")
    return (
        f'<g class="site {_word(state)}" data-site={quoteattr(name)}><title>{escape(hover)}</title>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text x="{x + side * 10:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(shown)}'
        f'<tspan class="dim" dx="6">{escape(words)}</tspan></text></g>'
    )


def _hub(one: Mapping[str, Any], x: float, y: float, width: float) -> str:
    found = one["bytes"]
    if one["role"] == "relay":
        figures = f"{sum(each['open'] for each in one['relays'])} connections"
        moved = sum(each["up"] + each["down"] for each in one["relays"])
    else:
        figures = f"version {one['version']}" if one["role"] == "ps" else f"round {one['version']}"
        moved = found.get("sockets up", 0) + found.get("sockets down", 0)
    lines = [
        _short(str(one["title"]), int(width / _CHARACTER) - 1),
        _short(str(one["role_words"]), int(width / _CHARACTER) - 1),
        _short(f"{figures}, {megabytes(moved)}", int(width / _CHARACTER) + 1),
    ]
    kind = "ended" if one["ended"] else "alive"
    texts = "".join(
        f'<text x="{x + width / 2:.1f}" y="{y + 20 + 16 * at:.1f}" text-anchor="middle"'
        f' class="{"name" if at == 0 else "dim"}">{escape(line)}</text>'
        for at, line in enumerate(lines)
    )
    hover = escape(f"{one['title']}: {one['alive']}")
    return (
        f'<g class="hub {kind}"><title>{hover}</title><rect x="{x:.1f}" y="{y:.1f}"'
        f' width="{width:.1f}" height="{HUB_HEIGHT}" rx="8"/>{texts}</g>'
    )


def _link(begin: tuple[float, float], end: tuple[float, float], width: int, title: str) -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<path class="ring" d="M{begin[0]:.1f} {begin[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"'
        f' stroke-width="{width}">{inner}</path>'
    )


def _word(state: str) -> str:
    """A class of the style sheet."""
    return "".join(one for one in state if one.isascii() and one.isalpha())


def _short(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    tail = min(6, max(1, length // 3))
    return f"{text[: max(1, length - tail - 1)]}…{text[-tail:]}"

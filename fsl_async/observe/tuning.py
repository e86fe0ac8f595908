"""Collects rank, order and labels that sites report, and how far each site moves.

Ranks and orders come with every delta, shares of labels where a site allows metrics,
norms of products from the parameter server's merge. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from fsl_async.observe.clients import ClientState
from fsl_async.roles.phrasing import counted

SHARE = "share_"
"""A metric's name begins with it; the name of a label follows."""
ONE_CLASS = 0.95
"""Share of one label from which a site counts as one of a single class."""
FAR = 3.0
"""A site that moves weights or products this many times as far as the median is named."""
MOST_LABELS = 16
_FACTS = ("rank", "order")


def saw_delta(client: ClientState, delta: Mapping[str, Any]) -> str:
    """Keep what a delta reports; returns a warning for people, once per process, or nothing."""
    facts, metrics = delta.get("facts") or {}, delta.get("metrics") or {}
    for name in _FACTS:
        value = facts.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            client.facts[name] = float(value)
    shares = {
        str(name).removeprefix(SHARE): float(value)
        for name, value in metrics.items()
        if str(name).startswith(SHARE) and isinstance(value, int | float)
    }
    was_known = bool(client.label_shares)
    client.label_shares = dict(list(shares.items())[:MOST_LABELS]) or client.label_shares
    label, share = max(client.label_shares.items(), key=lambda each: each[1], default=("", 0.0))
    if share < ONE_CLASS or was_known:
        return ""
    return (
        f"{client.name} has {share:.0%} {label} among its records: sites of one class pull a"
        " classifier apart (docs/TUNING.md, Ranks and labels)"
    )


def norms_of(merged: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By client, the mean norm of its deltas in a version. merged: as in the journal."""
    found: dict[str, list[float]] = {}
    for one in merged:
        client = str(one["delta"]["key"]).partition("/")[0]
        found.setdefault(client, []).append(float(one["norm"]))
    return {client: statistics.fmean(norms) for client, norms in found.items()}


def far_movers(norms: Mapping[str, float]) -> list[str]:
    """The clients that change weights, or products, much further than the median."""
    if len(norms) < 3:
        return []
    usual = statistics.median(norms.values())
    return [name for name, norm in sorted(norms.items()) if usual and norm > FAR * usual]


def site_lines(clients: Iterable[ClientState]) -> list[str]:
    """A line for each client that reported anything of this."""
    return [f"{client.name}: {words}" for client in clients if (words := _words(client))]


def _words(client: ClientState) -> str:
    parts = []
    if "rank" in client.facts:
        parts.append(f"rank {client.facts['rank']:.0f}")
    if client.facts.get("order") == 0:
        parts.append("zeroth order")
    if client.product_norm is not None:
        parts.append(f"moves products by {client.product_norm:.3g}")
    if client.deltas_clipped:
        parts.append(f"{counted(client.deltas_clipped, 'delta')} counted as shorter")
    parts += [f"{share:.0%} {label}" for label, share in client.label_shares.items()]
    return ", ".join(parts)

"""What sets clients apart: training that brings nothing, ranks, labels, how far they move. Pure.

Clients whose training brings the run nothing have deltas of norm 0, or deltas alike. Both are told
when they have lasted some rounds, and again only after they have ceased. Ranks and orders come with
every delta, shares of labels where a site allows metrics, norms of products from the parameter
server's merge.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fsl_async.observe.clients import ClientState
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.movement import ALARM_AFTER, CAUSES

if TYPE_CHECKING:
    from fsl_async.observe.run_state import RunState

ALIKE_ROUNDS = 3
"""Rounds in a row in which two clients' deltas are alike (`fsl_async.store.deltas.spool`)."""
MOST_PAIRS = 4096
_SHOWN = 4
SHARE = "share_"
"""A metric's name begins with it; the name of a label follows."""
ONE_CLASS = 0.95
"""Share of one label from which a site counts as one of a single class."""
FAR = 3.0
"""A site that moves weights or products this many times as far as the median is named."""
MOST_LABELS = 16
_FACTS = ("rank", "order")


# --- training that brings nothing ---


def saw_norm(run: RunState, client: ClientState, stored: Mapping[str, Any]) -> None:
    """Count a stored delta. stored: as in the journal's line delta_stored."""
    if not stored["delta"].get("steps"):
        return
    was_told = client.unmoved >= ALARM_AFTER
    client.unmoved = client.unmoved + 1 if stored.get("norm") == 0 else 0
    if client.unmoved == ALARM_AFTER:
        run.tell("does not move", unmoved_words(client), client.name, "warning")
    elif was_told and not client.unmoved:
        run.tell("moves again", f"{client.name} changes weights again", client.name)


def unmoved_words(client: ClientState) -> str:
    """A line about a client that changes nothing."""
    return (
        f"{client.name} trains, but its last {client.unmoved} deltas change no weight, and do not"
        f" count: {CAUSES}"
    )


def saw_alike(
    run: RunState, counts: dict[str, int], clients: Iterable[str], found: Mapping[str, Any]
) -> None:
    """Count the pairs of a version.

    counts: pair -> rounds in a row; changed in place. clients: whose deltas it merged. found: pair
    -> cosine, of those alike.
    """
    here = set(clients)
    for pair in [pair for pair in counts if pair not in found and here >= set(pair.split("/"))]:
        del counts[pair]
    for pair in list(found)[:MOST_PAIRS]:
        counts[pair] = min(counts.get(pair, 0), ALIKE_ROUNDS) + 1
    for text in _alike_words(pair for pair in found if counts.get(pair) == ALIKE_ROUNDS):
        run.tell("alike", text, level="warning")


def idle_lines(clients: Iterable[ClientState], counts: Mapping[str, int]) -> list[str]:
    """Lines about all of them that are told and have not ceased."""
    still = [unmoved_words(one) for one in clients if one.unmoved >= ALARM_AFTER]
    return still + _alike_words(pair for pair, rounds in counts.items() if rounds >= ALIKE_ROUNDS)


def _alike_words(pairs: Iterable[str]) -> list[str]:
    """A line for each group of clients that train the same."""
    groups: list[set[str]] = []
    for pair in pairs:
        names = set(pair.split("/"))
        names |= set().union(*(one for one in groups if one & names))
        groups = [*(one for one in groups if not one & names), names]
    return [_words(sorted(names)) for names in groups]


def _words(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more} send almost the same deltas, as clients do that train"
        " the same batches: take the data through fed.shard, and seed by fed.part or the client's"
        " name"
    )


# --- ranks, labels and movement ---


def saw_delta(client: ClientState, delta: Mapping[str, Any]) -> str:
    """Keep the figures of a delta. Return a warning once per client process, or ""."""
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


def far_movers(norms: Mapping[str, float]) -> list[str]:
    """The clients that change weights, or products, much further than the median."""
    if len(norms) < 3:
        return []
    usual = statistics.median(norms.values())
    return [name for name, norm in sorted(norms.items()) if usual and norm > FAR * usual]


def site_lines(clients: Iterable[ClientState]) -> list[str]:
    """A line for each client that reported anything of this."""
    return [f"{client.name}: {words}" for client in clients if (words := _site_words(client))]


def _site_words(client: ClientState) -> str:
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

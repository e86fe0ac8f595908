"""Clients whose training brings the run nothing: deltas of norm 0, and deltas alike. Pure.

Both are told when they have lasted some rounds, and again only after they have ceased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsl_async.observe.clients import ClientState
from fsl_async.observe.run import Run
from fsl_async.roles.sync.movement import ALARM_AFTER, CAUSES

ALIKE_ROUNDS = 3
"""Rounds in a row in which two clients' deltas are alike (`fsl_async.store.sketches`)."""
MOST_PAIRS = 4096
_SHOWN = 4


def saw_norm(run: Run, client: ClientState, stored: Mapping[str, Any]) -> None:
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
    run: Run, counts: dict[str, int], clients: Iterable[str], found: Mapping[str, Any]
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

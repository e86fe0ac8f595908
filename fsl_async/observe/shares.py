"""Shares of clients that send by themselves: of deltas and of weight in the newest versions. Pure.

Where each delta counts, a site that sends often decides what the model becomes, and accuracy does
not show it (docs/guides/who-may-come-and-go.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attrs import field, mutable

from fsl_async.observe.clients import ClientState
from fsl_async.roles.phrasing import counted, megabytes
from fsl_async.roles.sync.facts import VersionFact

RECENT, LEAST = 64, 16
"""Versions that count, and how many there must be before a warning."""
MOST_OF_EQUAL = 3.0
_NAMED = 8

Clients = Mapping[str, ClientState]


@mutable
class Shares:
    """Deltas and weights, by client, of the newest versions of a run without rounds."""

    deltas: list[dict[str, int]] = field(factory=list)
    weights: list[dict[str, float]] = field(factory=list)
    warnings: dict[str, str] = field(factory=dict)
    """A line about each client with more than MOST_OF_EQUAL times an equal share of the weight."""

    def add(self, made: VersionFact, clients: Clients) -> list[str]:
        """Take a version; return the warnings that are new."""
        if not made.weights:
            return []
        self.deltas = [*self.deltas, made.deltas][-RECENT:]
        self.weights = [*self.weights, made.weights][-RECENT:]
        before, found = self.warnings, self.of_clients()
        # A site that is connected and has sent nothing lately would have a share, too.
        sites = len(found.keys() | {name for name, one in clients.items() if one.connected})
        versions, limit = len(self.weights), MOST_OF_EQUAL / sites
        self.warnings = {
            name: f"{name} has {one['weight']:.0%} of the weight of the last {versions} versions,"
            f" more than {MOST_OF_EQUAL:g} times an equal share of {sites} sites; with"
            " outer.aggregation = latest sites that send seldom count as much"
            for name, one in found.items()
            if one["weight"] > limit and versions >= LEAST
        }
        return [line for name, line in self.warnings.items() if name not in before]

    def of_clients(self) -> dict[str, dict[str, float]]:
        """Return each client's share of the deltas ("arrivals") and of the weight, 0 to 1."""
        arrivals, weight = Counter[str](), dict[str, float]()
        for deltas in self.deltas:
            arrivals.update(deltas)
        for weights in self.weights:
            for name, factor in weights.items():
                weight[name] = weight.get(name, 0.0) + factor
        total = sum(weight.values()) or 1.0
        return {
            name: {
                "arrivals": round(arrivals[name] / arrivals.total(), 4),
                "weight": round(weight[name] / total, 4),
            }
            for name in sorted(weight)
        }

    def lines(self, clients: Clients) -> list[str]:
        """Return lines on the shares, and on the bytes of deltas that are used again."""
        found = self.of_clients()
        if not found:
            return []
        first = sorted(found, key=lambda name: -found[name]["weight"])[:_NAMED]
        parts = [f"{one} {found[one]['arrivals']:.0%}, {found[one]['weight']:.0%}" for one in first]
        parts += [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
        versions = counted(len(self.weights), "version")
        made = [f"share of deltas, and of weight, in {versions}: {'; '.join(parts)}"]
        made += self.warnings.values()
        pairs = zip(self.deltas, self.weights, strict=True)
        if any(weights.keys() - deltas.keys() for deltas, weights in pairs):
            kept = [clients[name].delta_bytes for name in self.weights[-1] if name in clients]
            text = f"{counted(len(kept), 'client')}, {megabytes(sum(kept))}"
            made.append(f"kept to be used again: the newest delta of each of {text}")
        return made

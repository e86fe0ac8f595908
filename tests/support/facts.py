"""Facts of a parameter server as its journal has them, with plausible defaults."""

from fsl_async.observe.journal_lines import fact_fields
from fsl_async.roles.sync.facts import RoundFact, VersionFact

__all__ = ["RoundFact", "VersionFact", "call_of", "line_of", "version_of"]


def line_of(fact, t):
    """Return the journal's line of a fact, of a process whose clock began at 0."""
    return {"t": t, "now": t, "kind": "fact", "type": fact.tag, **fact_fields(fact)}


def call_of(number, names, t, **more):
    """Return the fact of a round that calls these clients, none of which has answered."""
    waiting = {"waiting": len(names), "waited_for": tuple(sorted(names))}
    given = {"is_open": True, "called": len(names), "called_at": t} | waiting
    return RoundFact("collecting", number=number, **(given | more))


def version_of(version, deltas=(), *, digest="", tokens=0, **more):
    """Return the fact of a version. deltas: the client of each; all were called and in time."""
    names = list(dict.fromkeys(deltas))
    counts = {name: list(deltas).count(name) for name in names}
    given = {"called": len(names), "answered": len(names), "alive": len(names)}
    given |= {"asked": len(names), "in_time": len(names), "needed": max(1, len(names) // 2)}
    digest = digest or f"d{version}"
    return VersionFact(version, digest, tokens, deltas=counts, **(given | more))

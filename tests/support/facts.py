"""Facts of a parameter server as its journal has them, with plausible defaults."""

from fsl_async.observe.journal_lines import fact_fields
from fsl_async.roles.client_facts import ClientFact
from fsl_async.roles.machine import Effect, Fact
from fsl_async.roles.sync.events import VersionCommitted
from fsl_async.roles.sync.facts import Clients, RoundFact, VersionFact

__all__ = [
    "ClientFact", "FactWriter", "RoundFact", "VersionFact",
    "call_of", "client_line", "client_of", "line_of", "version_of",
]  # fmt: skip


class FactWriter:
    """Writes events, effects and facts to a journal, with the facts of clients that follow."""

    def __init__(self, journal):
        self.journal, self.clients = journal, Clients()

    def write(self, items, now):
        """Write items in order; the facts of versions say that there is one."""
        for item in items:
            if isinstance(item, Fact):
                self.journal.fact(item, now)
                if isinstance(item, VersionFact):
                    self.clients.of(VersionCommitted(item.version, "", 0, 0.0))
                continue
            (self.journal.effect if isinstance(item, Effect) else self.journal.event)(item, now)
            for fact in self.clients.of(item):
                self.journal.fact(fact, now)


def client_of(peer, state, version=-1, incarnation=1, **more):
    """Return the fact of a client."""
    return ClientFact(peer, incarnation, state, version, **more)


def line_of(fact, t):
    """Return the journal's line of a fact, of a process whose clock began at 0."""
    return {"t": t, "now": t, "kind": "fact", "type": fact.tag, **fact_fields(fact)}


def client_line(t, peer, state, version=-1, incarnation=1, **more):
    """Return the journal's line of it."""
    return line_of(client_of(peer, state, version, incarnation, **more), t)


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

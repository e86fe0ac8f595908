"""States what clients do, as a server sees it, in facts for its journal. Pure.

A client's session is of one process. Its state is

    joining      it has no version yet           training    it trains from `version`
    publishing   it sends the initial weights    sending     a delta of it is on its way
    fetching     a version is on its way to it   gone        its session ended
                                                 refused     it cannot take part
"""

from __future__ import annotations

from attrs import evolve, frozen

from fsl_async.roles.machine import ClientLeft, Fact, Refuse


@frozen
class ClientFact(Fact, tag="client"):
    """Records what a client does, or the outcome of one of its deltas."""

    peer: str
    incarnation: int
    state: str
    version: int = -1
    """The version that it holds; -1: none yet in this process."""
    begins: bool = False
    """A session begins."""
    in_run: bool = False
    """It was welcomed to this run before, by its own word."""
    why: str = ""
    """The reason: a code when the state is gone, a sentence or empty when it is refused or a delta
    is not accepted."""
    goodbye: str = ""
    """When the state is gone: the reason that the client gave, in words."""
    key: str = ""
    """A delta, whose outcome is"""
    outcome: str = ""
    """accepted, held, released, or the code with which it was declined for good."""


class ClientFacts:
    """Keeps the newest fact of each client, and returns those that are new."""

    def __init__(self) -> None:
        self.newest: dict[str, ClientFact] = {}

    def begins(self, fact: ClientFact) -> list[Fact]:
        """Take the first fact of a session."""
        before = self.newest.get(fact.peer)
        if before is not None and before.incarnation == fact.incarnation:
            fact = evolve(fact, version=before.version)
        self.newest[fact.peer] = evolve(fact, begins=False, in_run=False)
        return [fact]

    def becomes(self, peer: str, state: str, version: int | None = None) -> list[Fact]:
        """Take the state of a client with a session."""
        before = self.newest.get(peer)
        if before is None:
            return []
        after = evolve(before, state=state, version=before.version if version is None else version)
        self.newest[peer] = after
        return [] if after == before else [after]

    def settled(self, peer: str, key: str, outcome: str, why: str = "") -> list[Fact]:
        """State the outcome of a delta. peer: its client, which may have left."""
        now = self.newest.get(peer) or ClientFact(peer, -1, "gone")
        return [evolve(now, key=key, outcome=outcome, why=why)]

    def left(self, event: ClientLeft) -> list[Fact]:
        """Take the end of a session, if it is the one that is open."""
        before = self.newest.get(event.peer)
        if before is None or before.incarnation != event.incarnation:
            return []
        del self.newest[event.peer]
        return [evolve(before, state="gone", why=event.reason, goodbye=event.why)]

    def refused(self, effect: Refuse) -> list[Fact]:
        """Take a refusal, which ends a session if there was one."""
        self.newest.pop(effect.peer, None)
        return [ClientFact(effect.peer, -1, "refused", why=effect.text)]

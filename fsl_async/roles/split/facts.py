"""States what the clients of a split server do, in facts for its journal. Pure."""

from collections.abc import Sequence

from fsl_async.roles.client_facts import ClientBook, ClientFact
from fsl_async.roles.machine import ClientLeft, Effect, Event, Fact, Refuse
from fsl_async.roles.split.effects import AdmitSplit


class SplitClients(ClientBook):
    """The clients of a split server: there is nothing that they would have to fetch first."""

    def after(self, event: Event, effects: Sequence[Effect]) -> list[Fact]:
        """Return the facts that `event`, which the machine has handled, has changed."""
        found = self.left(event) if isinstance(event, ClientLeft) else []
        for effect in effects:
            if isinstance(effect, AdmitSplit):
                peer, incarnation = effect.peer, effect.incarnation
                found += self.begins(ClientFact(peer, incarnation, "training", begins=True))
            elif isinstance(effect, Refuse):
                found += self.refused(effect)
        return found

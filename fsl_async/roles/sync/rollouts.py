"""Passes answers of clients that roll out on to clients that train. Pure.

    Rollout    of a version of at most two ago    Send it to one client that trains, in turns; too
                                                  many of a version, or of a disputed one: nothing
    Disputed   of a client that trains            a client is left out that most of them dispute

Nothing is kept: answers that are lost cost time alone, since a client that trains draws its own
where none are here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import evolve

from fsl_async.roles.machine import Effect, Note, Received, Send
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import ROLL_OUT

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.roles.sync.deltas import Deltas
    from fsl_async.roles.sync.ps_state import Member

MOST_AGE = 2
"""Versions that answers may be behind."""


class Rollouts:
    """It shares the machine's members and deltas."""

    def __init__(self, config: Config, members: dict[str, Member], deltas: Deltas) -> None:
        self._members, self._deltas = members, deltas
        self._most = config.tune.steps * config.train.batch
        """Groups of a client and version for each client that trains: all that it can use."""
        self._passed = Counter[str]()
        self._version = -1
        self._turn = 0
        self.disputed_by: dict[str, set[str]] = {}
        """Client that rolls out -> the clients that dispute its answers."""

    def _trainers(self) -> list[str]:
        return sorted(name for name, one in self._members.items() if one.trains and one.attached)

    def _is_disputed(self, site: str) -> bool:
        trainers = set(self._trainers())
        return 2 * len(self.disputed_by.get(site, set()) & trainers) > len(trainers)

    def pass_on(self, event: Received[msg.Rollout], now: float) -> list[Effect]:
        """Send answers on."""
        peer, version, trainers = event.peer, self._deltas.version, self._trainers()
        if version != self._version:
            self._version, self._passed = version, Counter()
        member = self._members.get(peer)
        is_due = version - MOST_AGE <= event.message.version <= version
        if member is None or member.duty != ROLL_OUT or not trainers or not is_due:
            return []
        if self._passed[peer] >= self._most * len(trainers) or self._is_disputed(peer):
            return []
        self._passed[peer] += 1
        self._turn += 1
        message = evolve(event.message, site=peer)
        return [Send(trainers[self._turn % len(trainers)], message)]

    def disputed(self, event: Received[msg.Disputed], now: float) -> list[Effect]:
        """Count who disputes the answers of a client."""
        peer, site = event.peer, event.message.site
        found, member = self._members.get(site), self._members.get(peer)
        if found is None or found.duty != ROLL_OUT or member is None or not member.trains:
            return []
        by = self.disputed_by.setdefault(site, set())
        if peer in by:
            return []
        by.add(peer)
        text = f"{peer} disputes the rewards that {site} gave its answers"
        if self._is_disputed(site):
            text += ": most clients do, so none is passed on any more"
        return [Note(text, "warning", {"alarm": "disputed", "client": site})]

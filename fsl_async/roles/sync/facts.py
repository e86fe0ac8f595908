"""Facts: records of what the parameter server has decided, for its journal. Pure.

The journal has a line for each fact; status, page, trackers and reports are sums of these lines
(`fsl_async.observe`). Events and effects stay in the journal for debugging.

    client    what a client does, and the outcomes of its deltas (`fsl_async.roles.client_facts`)
    round     the open round and the time of the next call, whenever any of it changes
    version   a version that is durable, or found at the start: what is in it, and which of the
              called clients are not
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from fsl_async.roles.client_facts import ClientFact, ClientFacts
from fsl_async.roles.groups.effects import Adopt
from fsl_async.roles.machine import (
    ClientLeft,
    Effect,
    Event,
    Fact,
    Received,
    Refuse,
    Send,
    StreamLost,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey, MergedDelta, one_each
from fsl_async.roles.sync.ps_state import Phase, Round

if TYPE_CHECKING:
    from fsl_async.roles.sync.ps import ParameterServerMachine

NAMED = 16
"""A fact lists this many of the clients that a round waits for; the others are counted."""
_NO_ROUND = (
    ev.HeartbeatReceived, msg.Fetch, ev.VersionSent, msg.DeltaMeta, msg.Holding,
)  # fmt: skip
"""Frequent events and messages that change neither rounds nor versions."""
_STATES = {msg.Fetch: "fetching", msg.DeltaMeta: "sending", ev.DeltaStored: "training"}
_OTHER_WORDS = {"empty": "waiting", "done": "ended"}
"""Phases of the machine that a fact gives another name."""


@frozen
class RoundFact(Fact, tag="round"):
    """Where rounds are. Times are seconds of the shell's clock; None: not known, or not set."""

    phase: str = "waiting"
    """waiting (for the first weights), ready, collecting, merging or ended."""
    pending: int = 0
    """Deltas that are acknowledged and in no version."""
    next_at: float | None = None
    """When clients are called next, with the trigger "clock"."""
    late: tuple[str, ...] = ()
    """Connected clients without an answer since a round that merged without their delta."""
    number: int = -1
    """The version that the newest round starts from; the others are of a round that is open."""
    is_open: bool = False
    called: int = 0
    answered: int = 0
    """Called clients that sent a delta."""
    waiting: int = 0
    """Called clients that are here and have not answered."""
    waited_for: tuple[str, ...] = ()
    """The first of these by name."""
    called_at: float | None = None
    quorum_at: float | None = None
    closes_at: float | None = None
    """When the grace window closes."""


@frozen
class VersionFact(Fact, tag="version"):
    """A durable version. made_of: as in `VersionCommitted`, or "disk": it was found at the start.

    The others are of deltas and of the round that made it; names are of clients.
    """

    version: int
    digest: str
    tokens: int
    """Merged so far."""
    made_of: str = "deltas"
    global_round: int = -1
    held: tuple[str, ...] = ()
    """Keys of deltas that are held back, for "disk"."""
    gained: int = 0
    """Tokens of its deltas."""
    deltas: dict[str, int] = field(factory=dict)
    """Client -> its deltas in this version."""
    before: int = 0
    """Deltas that were stored before this process began."""
    called: int = 0
    answered: int = 0
    alive: int = 0
    """Called clients that are still here."""
    asked: int = 0
    """Clients that got a call; less than `called` where they take turns."""
    in_time: int = 0
    """Called clients whose delta of this round is in it."""
    needed: int = 0
    late: tuple[str, ...] = ()
    nothing: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    earlier: int = 0
    """Deltas of earlier rounds, or of clients that were not called."""
    earlier_of: tuple[str, ...] = ()
    loss: float | None = None
    """Mean of the losses that its deltas carried."""
    staleness_mean: float | None = None
    staleness_max: int | None = None
    cosine: float | None = None
    norms: dict[str, float] = field(factory=dict)
    """Client -> mean norm of its deltas."""
    product_norms: dict[str, float] = field(factory=dict)
    clipped: dict[str, int] = field(factory=dict)
    """Client -> its deltas that count as if they were shorter."""
    scored: dict[str, bool] = field(factory=dict)
    """Clients whose deltas an evaluator scored -> whether it refused one."""
    alike: dict[str, float] = field(factory=dict)
    opposite: str = ""
    weights: dict[str, float] = field(factory=dict)
    """Client -> the factor of its deltas, where clients send by themselves; also of those whose
    earlier deltas are used again."""


class Clients(ClientFacts):
    """The clients of a parameter server."""

    _has_version = False

    def of(self, item: Event | Effect) -> list[Fact]:
        """Return the facts that follow from an event or an effect."""
        return self._of_event(item) if isinstance(item, Event) else self._of_effect(item)

    def _of_event(self, event: Event) -> list[Fact]:
        match event:
            case ev.ClientHello(peer, incarnation, run):
                begun = ClientFact(peer, incarnation, "joining", begins=True, in_run=bool(run))
                return self.begins(begun)
            case ev.ModelAttached(peer, difference=None):
                return self.becomes(peer, "fetching" if self._has_version else "joining")
            case Received(peer, msg.Holding(version)):
                return self.becomes(peer, "training", version)
            case StreamLost(peer):
                before = self.newest.get(peer)
                if before is not None and before.state in {"sending", "publishing"}:
                    return self.becomes(peer, "training" if before.version >= 0 else "joining")
            case ClientLeft():
                return self.left(event)
            case Received(peer, msg.Fetch() | msg.DeltaMeta()) | ev.DeltaStored(peer):
                return self.becomes(peer, _STATES[event.topic])
            case ev.VersionCommitted(version) | ev.Recovered(version):
                self._has_version = version >= 0
        return []

    def _of_effect(self, effect: Effect) -> list[Fact]:
        match effect:
            case Refuse():
                return self.refused(effect)
            case Send(peer, msg.Reject()):
                return self.refused(Refuse(peer, "", ""))
            case Send(peer, msg.Publish()):
                return self.becomes(peer, "publishing")
            case Send(peer, msg.Accepted(key)):
                return self.settled(peer, key.text, "accepted")
            case Send(peer, msg.Declined(key, code)) if code != "later":
                return self.settled(peer, key.text, code)
            case do.Quarantine(key, reason, held=True):
                return self.settled(key.client, key.text, "held", reason)
            case do.Release(key):
                return self.settled(key.client, key.text, "released")
        return []


class RunFacts:
    """Follows a machine, and returns the facts that an event has changed."""

    def __init__(self, machine: ParameterServerMachine) -> None:
        self._machine = machine
        self._clients = Clients()
        self._newest: RoundFact | None = None
        self._number = -1
        self._before: frozenset[DeltaKey] = frozenset()
        """Deltas that the start found pending."""
        self._merged: Sequence[MergedDelta] = ()
        """Deltas of the version that is being made, and its round."""
        self._round: Round | None = None
        self._weights: dict[str, float] = {}
        self._global_round = -1

    def after(self, event: Event, effects: Sequence[Effect]) -> list[Fact]:
        """Return the facts that `event`, which the machine has handled, has changed."""
        items: list[Event | Effect] = [event, *effects]
        found = [fact for item in items for fact in self._clients.of(item)]
        if event.topic in _NO_ROUND:
            return found
        if isinstance(event, ev.Recovered):
            self._before = frozenset(one.key for one in event.pending)
            held = tuple(one.key.text for one in event.held)
            found.append(
                VersionFact(event.version, event.digest, event.tokens_total, "disk", held=held)
            )
        elif isinstance(event, ev.VersionCommitted):
            found.append(self._version(event))
        for effect in effects:
            if isinstance(effect, do.Commit):
                self._merged, self._round = effect.merged, self._machine.round
                weights = self._machine.deltas.weights(effect.scale)
                self._weights = {client: float(f"{one:.4g}") for client, one in weights.items()}
            elif isinstance(effect, Adopt):
                self._global_round = effect.decision.round
        now = self._rounds()
        if now != self._newest:
            self._newest = now
            found.append(now)
        return found

    def _rounds(self) -> RoundFact:
        machine = self._machine
        phase, pending = machine.phase.value, len(machine.deltas.pending)
        phase = _OTHER_WORDS.get(phase, phase)
        late = tuple(sorted(machine.rounds.late))
        next_at = machine.deadlines.when("sync") if machine.config.sync.trigger == "clock" else None
        open_ = machine.round
        if open_ is None or not open_.asked:  # clients that send by themselves are not called
            phase = "ready" if phase == "collecting" else phase
            return RoundFact(phase, pending, next_at, late, self._number)
        self._number = open_.number
        missing = open_.missing()
        has_window = machine.phase is Phase.COLLECTING and open_.quorum_at is not None
        return RoundFact(
            phase,
            pending,
            next_at,
            late,
            open_.number,
            is_open=True,
            called=len(open_.asked),
            answered=open_.contributors(),
            waiting=len(missing),
            waited_for=tuple(missing[:NAMED]),
            called_at=open_.called_at,
            quorum_at=open_.quorum_at,
            closes_at=machine.deadlines.when("round") if has_window else None,
        )

    def _version(self, event: ev.VersionCommitted) -> VersionFact:
        machine = self._machine
        total = machine.tokens_total
        if event.made_of != "deltas" or event.version == 0:
            number = self._global_round if event.made_of != "deltas" else -1
            return VersionFact(event.version, event.digest, total, event.made_of, number)
        merged, round_ = self._merged, self._round or Round(-1, 0.0, 0.0, {})
        self._merged, self._round = (), None
        asked = round_.asked
        of_round = [one for one in merged if one.delta.round == round_.number]
        in_time = {one.key.client for one in of_round} & asked.keys()
        others = [
            one.key.client
            for one in merged
            if one.delta.round != round_.number or one.key.client not in in_time
        ]
        members = machine.members.items()
        alive = {name for name, one in members if asked.get(name) == one.incarnation}
        absent = [name for name in asked if name not in in_time]
        empty = {name for name, contributed in round_.answered.items() if not contributed}
        needed = math.ceil(machine.config.sync.quorum * len(alive | in_time))
        losses = [one.delta.metrics.get("loss") for one in merged]
        finite = [one for one in losses if isinstance(one, int | float) and math.isfinite(one)]
        stale = [one.staleness for one in merged]
        return VersionFact(
            event.version,
            event.digest,
            total,
            gained=sum(one.delta.tokens for one in merged),
            deltas=dict(Counter(one.key.client for one in merged)),
            before=sum(one.key in self._before for one in merged),
            called=round_.called,
            answered=round_.contributors(),
            alive=len(alive),
            asked=len(asked),
            in_time=len(in_time),
            needed=max(1, needed) if asked else 0,
            late=tuple(name for name in absent if name in alive and name not in empty),
            nothing=tuple(name for name in absent if name in alive and name in empty),
            left=tuple(name for name in absent if name not in alive),
            earlier=len(others),
            earlier_of=tuple(sorted(set(others))),
            loss=statistics.fmean(finite) if finite else None,
            staleness_mean=statistics.fmean(stale) if stale else None,
            staleness_max=max(stale, default=None),
            cosine=event.cosine,
            norms={one.key.client: one.norm for one in one_each(merged)},
            product_norms=event.product_norms,
            clipped=dict(Counter(one.key.client for one in merged if one.clip < 1.0)),
            scored=_scored(merged),
            alike=event.alike,
            opposite=event.opposite,
            weights={} if asked else self._weights,
        )


def _scored(merged: Sequence[MergedDelta]) -> dict[str, bool]:
    """Return the clients whose deltas have a score -> whether one was refused."""
    found: dict[str, bool] = {}
    for one in (one for one in merged if one.score is not None):
        found[one.key.client] = one.is_refused or found.get(one.key.client, False)
    return found

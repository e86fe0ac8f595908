"""Decides for the node of a gang: the ranks of one torchrun that train one model. Pure.

Rules
- A gang has all ranks of its world, of one generation (torchrun's count of restarts). The first
  hello of a later generation ends the gang before it. Ranks of an earlier one are dropped.
- Directives are numbered in each gang, and every rank gets the same ones in the same order, so
  ranks that have carried out the first n of them are in the same state.
- One order is in flight: a directive that every rank answers with Done. It is answered once, when
  all ranks are done, with the sum of their tokens; their steps must be equal.
- A rank that is lost ends its gang: the order in flight is unanswered, for a snapshot of some ranks
  is none. What was answered is whole, and the node's.
- The ranges that ranks copy out must be all values of the vector, each once.
- Reading the base (`fed.at_version`) is beside the order: a rank that reads has not come to it yet.
- What holds for good (stop, refusal, the last position and pace) is sent to a new gang again.
- Without a complete gang for `wait_s` the node gives up.
- Ranks return, and read the base, together. Where some have waited `APART_S` for the others, a line
  says so: one that returned early would hold the others up until their collectives time out.

    state     event or message                 -> effects
    waiting   Hello from all ranks,               Direct Welcome once there are both
              ContextKnown
    waiting   Shape from all ranks                MakeSlots
    waiting   RankAttached from all ranks         GangAttached -> ready; Failed if ranges do not fit
    ready     Asked                               Direct -> ordered
    ordered   Done from all ranks                 Answered -> ready
    waiting   Asked                               Unanswered
    any       Told                                Direct
    ready     BaseWanted from all ranks           ReadBase; then Told(Base) by the shell
    any       Done from all ranks, of the base    BaseRead
    any       Ended from all ranks                AllEnded
    any       Ended with an error for good        Failed
    any       RankLost                            Drop the others, Unanswered, GangLost -> waiting
    waiting   timer "ranks"                       GaveUp
    ready     timer "apart"                       Note
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from attrs import field, frozen

from fsl_async.roles import gang_messages as msg
from fsl_async.roles.machine import (
    Deadlines,
    Effect,
    Event,
    Note,
    Received,
    RoleMachine,
    TimerFired,
)

WAIT_S = 1800.0
"""How long a node waits for ranks. It sees when torchrun ends; until then a script may load for
long before it joins."""
APART_S = 60.0
"""How long some ranks may wait for others before a line says so; saving a model may take longer."""
LARGEST = ("nonfinite", "snapshot_s")
"""Metrics of which the largest of the ranks counts; of others the mean."""
Range = tuple[int, int]


# --- events, besides messages, whose peer is the shell's name of the connection ------------------


@frozen
class RankAttached(Event, tag="rank_attached"):
    """A rank has copied its ranges of the first weights; values: of the flat vector."""

    peer: str
    fingerprint: str
    ranges: tuple[Range, ...]


@frozen
class RankLost(Event, tag="rank_lost"):
    """A connection has closed."""

    peer: str
    reason: str


@frozen
class ContextKnown(Event, tag="context_known"):
    """The parameter server has welcomed this client."""

    context: bytes


@frozen
class Asked(Event, tag="gang_asked"):
    """Have all ranks carry out a directive. Its number is set here."""

    order: msg.Directive


@frozen
class Told(Event, tag="gang_told"):
    """Send all ranks a directive that only a Base answers. Its number is set here."""

    directive: msg.Directive


# --- effects -------------------------------------------------------------------------------------


@frozen
class Direct(Effect, tag="gang_direct"):
    """Send a directive to these connections, in this order."""

    peers: tuple[str, ...]
    directive: msg.Directive


@frozen
class Drop(Effect, tag="gang_drop"):
    """Close a connection; its rank then ends with an error.

    reason: to be told; empty where a GangLost says it.
    """

    peer: str
    reason: str = ""


@frozen
class MakeSlots(Effect, tag="make_slots"):
    """Make the slots of vectors of so many values, and tell them to the ranks."""

    values: int


@frozen
class GangAttached(Effect, tag="gang_attached"):
    """The first weights of all ranks are in slot 0. world: ranks of the gang."""

    fingerprint: str
    world: int


@frozen
class Answered(Effect, tag="gang_answered"):
    """All ranks are done with the order in flight. done: of all of them together."""

    done: msg.Done


@frozen
class Unanswered(Effect, tag="gang_unanswered"):
    """No gang carries out the order."""

    reason: str


@frozen
class ReadBase(Effect, tag="read_base"):
    """All ranks wait for the base: tell them, and keep it as it is until BaseRead."""


@frozen
class BaseRead(Effect, tag="base_read"):
    """All ranks have read the base, or are lost."""


@frozen
class GangLost(Effect, tag="gang_lost"):
    """The gang is gone; work since its last snapshot is lost. attached: it had a model."""

    reason: str
    attached: bool


@frozen
class AllEnded(Effect, tag="gang_ended"):
    """Training has returned in all ranks, which still carry out orders."""


@frozen
class Failed(Effect, tag="gang_failed"):
    """This gang cannot train here, and another one could not either."""

    text: str
    code: int


@frozen
class GaveUp(Effect, tag="gang_gave_up"):
    """No complete gang came within the time for it."""

    text: str


# --- the machine ---------------------------------------------------------------------------------


@attrs.define
class _Rank:
    """What one rank of the present gang has said."""

    peer: str
    values: int = 0
    attached: RankAttached | None = None
    done: msg.Done | None = None
    wants_base: bool = False
    has_read: bool = False
    ended: bool = False


@attrs.define
class _Gang:
    """The gang that forms or trains."""

    generation: int
    world: int
    ranks: dict[int, _Rank] = field(factory=dict)
    number: int = 0  # of the last directive
    is_welcomed: bool = False
    has_slots: bool = False
    is_attached: bool = False
    order: int = 0  # number of the order in flight; 0: none
    base: int = 0  # number of the Base that is being read
    all_ended: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.ranks) == self.world

    @property
    def peers(self) -> tuple[str, ...]:
        """Connections from the last rank to rank 0, which leads the others."""
        return tuple(self.ranks[rank].peer for rank in sorted(self.ranks, reverse=True))

    def has_all(self, holds: Callable[[_Rank], Any]) -> bool:
        return self.is_complete and all(holds(rank) for rank in self.ranks.values())


class GangMachine(RoleMachine):
    """The gang of one node. world: its ranks; 0: as many as the first hello says."""

    senders = "a rank"

    def __init__(self, world: int = 0, *, wait_s: float = WAIT_S, now: float = 0.0) -> None:
        self.gang: _Gang | None = None
        self.values = 0  # of the model, which all gangs of this node must have
        self._world = world
        self._wait_s = wait_s
        self._context: bytes | None = None
        self._lasting: dict[type[msg.Directive], msg.Directive] = {}
        self.deadlines = Deadlines()
        self.deadlines.set("ranks", now + wait_s)
        self.handlers = {
            msg.Hello: self._hello,
            ContextKnown: self._context_known,
            Asked: self._asked,
            Told: self._told,
            TimerFired: self._timer,
            msg.Shape: self._shape,
            RankAttached: self._attached,
            msg.Done: self._done,
            msg.BaseWanted: self._base_asked,
            msg.Ended: self._ended,
            RankLost: self._lost,
        }

    @property
    def has_gang(self) -> bool:
        """Whether a gang is complete, with a model."""
        return self.gang is not None and self.gang.is_attached

    def rank_of(self, peer: str) -> int | None:
        """The rank of a connection of the present gang; None for others."""
        ranks = {} if self.gang is None else self.gang.ranks
        return next((number for number, rank in ranks.items() if rank.peer == peer), None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """As `RoleMachine.handle`; of a connection that is no rank of the gang only a Hello."""
        match event:
            case Received(message=msg.Hello()):
                pass
            case Received() | RankAttached() | RankLost() if self.rank_of(event.peer) is None:
                return []
        return super().handle(event, now)

    def _sender(self, event: Received[Any] | RankAttached | RankLost) -> tuple[_Gang, _Rank]:
        """The gang, and the rank of it that an event is of."""
        number = self.rank_of(event.peer)
        assert self.gang is not None
        assert number is not None
        return self.gang, self.gang.ranks[number]

    # --- a gang forms ---

    def _hello(self, event: Received[msg.Hello], now: float) -> list[Effect]:
        peer, hello = event.peer, event.message
        world = self._world or hello.world
        if hello.world != world or not 0 <= hello.rank < world or hello.generation < 0:
            text = f"rank {hello.rank} of {hello.world} is none of the {world} ranks here"
            return [Drop(peer, text)]
        gang, effects = self.gang, list[Effect]()
        if gang is not None and hello.generation > gang.generation:
            effects, gang = self._lose("torchrun started its ranks again", now), None
        if gang is None:
            gang = self.gang = _Gang(hello.generation, world)
        if hello.generation < gang.generation or hello.rank in gang.ranks:
            return [
                *effects,
                Drop(peer, f"rank {hello.rank} is here already, or was replaced"),
            ]
        self._world = world
        gang.ranks[hello.rank] = _Rank(peer)
        if gang.is_complete:
            self.deadlines.cancel("ranks")
        return [*effects, *self._welcome()]

    def _context_known(self, event: ContextKnown, now: float) -> list[Effect]:
        self._context = event.context
        return self._welcome()

    def _welcome(self) -> list[Effect]:
        gang = self.gang
        if gang is None or not gang.is_complete or gang.is_welcomed:
            return []
        effects: list[Effect] = []
        if self._context is not None:
            gang.is_welcomed = True
            effects.append(self._direct(msg.Welcome(0, self._context)))
        elif msg.Stop not in self._lasting and msg.Refuse not in self._lasting:
            return []
        else:
            gang.is_welcomed = True
        return effects + [self._direct(one) for one in self._lasting.values()]

    def _shape(self, event: Received[msg.Shape], now: float) -> list[Effect]:
        (gang, rank), values = self._sender(event), event.message.values
        if gang.has_slots:
            return []
        rank.values = values
        if not gang.has_all(lambda one: one.values):
            return []
        found = {one.values for one in gang.ranks.values()}
        if len(found) > 1 or self.values not in {0, values}:
            wanted = {self.values} if self.values else set()
            shown = ", ".join(f"{one:,}" for one in sorted(found | wanted))
            return [Failed(f"the ranks have models of different sizes: {shown} values", 2)]
        self.values, gang.has_slots = values, True
        return [MakeSlots(values)]

    def _attached(self, event: RankAttached, now: float) -> list[Effect]:
        gang, rank = self._sender(event)
        if gang.is_attached or not gang.has_slots:
            return []
        rank.attached = event
        if not gang.has_all(lambda one: one.attached):
            return []
        given = [one.attached for one in gang.ranks.values() if one.attached is not None]
        if len({one.fingerprint for one in given}) > 1:
            text = (
                "the ranks have attached different models: all must attach the same one (stages of"
                " a pipeline are not supported)"
            )
            return [Failed(text, 2)]
        place = uncovered([part for one in given for part in one.ranges], self.values)
        if place is not None:
            text = (
                f"value {place:,} of the model is copied by no rank, or by two: shard it with"
                " fully_shard over all ranks, or hold it whole in each"
            )
            return [Failed(text, 2)]
        gang.is_attached = True
        return [GangAttached(event.fingerprint, gang.world)]

    # --- directives ---

    def _direct(self, directive: msg.Directive) -> Effect:
        gang = self.gang
        assert gang is not None
        gang.number += 1
        return Direct(gang.peers, attrs.evolve(directive, number=gang.number))

    def _told(self, event: Told, now: float) -> list[Effect]:
        gang, directive = self.gang, event.directive
        if isinstance(directive, msg.Stop | msg.Refuse | msg.Position | msg.Pace):
            self._lasting.pop(type(directive), None)  # the order of a new gang is that of the last
            self._lasting[type(directive)] = directive
        if gang is None or not gang.is_complete:
            return []
        if not gang.is_welcomed:
            return self._welcome()
        if isinstance(directive, msg.Base):
            gang.base = gang.number + 1
        return [self._direct(directive)]

    def _asked(self, event: Asked, now: float) -> list[Effect]:
        gang = self.gang
        if gang is None or not gang.is_attached:
            return [Unanswered("there are no ranks at the moment")]
        assert not gang.order, "one order in flight"
        gang.order = gang.number + 1
        for rank in gang.ranks.values():
            rank.done = None
        return [self._direct(event.order)]

    def _done(self, event: Received[msg.Done], now: float) -> list[Effect]:
        (gang, rank), number = self._sender(event), event.message.number
        if number == gang.base and number:
            rank.has_read = True
            return self._base_read() if gang.has_all(lambda one: one.has_read) else []
        if number != gang.order or not number:
            return []
        rank.done = event.message
        if not gang.has_all(lambda one: one.done):
            return []
        gang.order = 0
        dones = [gang.ranks[one].done for one in sorted(gang.ranks)]
        given = [one for one in dones if one is not None]
        if len({one.steps for one in given}) > 1:
            shown = ", ".join(str(one.steps) for one in given)
            text = (
                f"the ranks have made different numbers of steps ({shown}): every rank must call"
                " fed.step after each of its steps"
            )
            return [Unanswered(text), Failed(text, 2)]
        return [Answered(joined(given))]

    def _base_asked(self, event: Received[msg.BaseWanted], now: float) -> list[Effect]:
        gang, rank = self._sender(event)
        if not gang.is_attached:
            return []
        rank.wants_base = True
        if gang.has_all(lambda one: one.wants_base):
            self.deadlines.cancel("apart")
            return [ReadBase()]
        self.deadlines.set("apart", now + APART_S)
        return []

    def _base_read(self) -> list[Effect]:
        assert self.gang is not None
        self.gang.base = 0
        for rank in self.gang.ranks.values():
            rank.wants_base = rank.has_read = False
        return [BaseRead()]

    # --- the end ---

    def _ended(self, event: Received[msg.Ended], now: float) -> list[Effect]:
        (gang, rank), ended = self._sender(event), event.message
        if ended.error:
            return [Failed(ended.error, ended.code)]
        rank.ended = True
        if gang.all_ended:
            return []
        if not gang.has_all(lambda one: one.ended):
            self.deadlines.set("apart", now + APART_S)
            return []
        self.deadlines.cancel("apart")
        gang.all_ended = True
        return [AllEnded()]

    def _lost(self, event: RankLost, now: float) -> list[Effect]:
        number = self.rank_of(event.peer)
        return self._lose(f"rank {number} is gone ({event.reason})", now, event.peer)

    def _lose(self, reason: str, now: float, gone: str = "") -> list[Effect]:
        gang, self.gang = self.gang, None
        assert gang is not None
        self.deadlines.set("ranks", now + self._wait_s)
        self.deadlines.cancel("apart")
        effects: list[Effect] = [Drop(peer) for peer in gang.peers if peer != gone]
        if any(rank.wants_base for rank in gang.ranks.values()):
            effects.append(BaseRead())
        if gang.order:
            effects.append(Unanswered(reason))
        return [*effects, GangLost(reason, gang.is_attached)]

    def _timer(self, event: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            if name == "ranks":
                effects.append(GaveUp(f"no ranks came within {self._wait_s:g} s"))
            else:
                effects += self._apart()
        return effects

    def _apart(self) -> list[Effect]:
        """Say which ranks the others wait for."""
        ranks = {} if self.gang is None else self.gang.ranks
        wanting = [number for number, rank in ranks.items() if rank.wants_base]
        there = wanting or [number for number, rank in ranks.items() if rank.ended]
        did = "wait in fed.at_version" if wanting else "have returned"
        missing = [number for number in ranks if number not in there]
        if not there or not missing:
            return []
        text = (
            f"ranks {_listed(there)} {did} for {APART_S:g} s, and ranks {_listed(missing)} do not:"
            " unless they save or evaluate, every rank must do so after the same step"
        )
        return [Note(text, "warning")]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def uncovered(ranges: Sequence[Range], values: int) -> int | None:
    """Return the first value that is in no range or in two; None where each is in one."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            return min(start, at)
        at = stop
    return None if at == values else min(at, values)


def joined(dones: Sequence[msg.Done]) -> msg.Done:
    """What the ranks have done together: tokens added up, means of metrics, the facts of rank 0."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for one in dones for name in one.metrics):
        found = [float(one.metrics[name]) for one in dones if name in one.metrics]
        metrics[name] = max(found) if name in LARGEST else sum(found) / len(found)
    return msg.Done(
        dones[0].number,
        tokens=sum(one.tokens for one in dones),
        steps=dones[0].steps,
        finite=all(one.finite for one in dones),
        taken=any(one.taken for one in dones),
        dropped=sum(one.dropped for one in dones),
        metrics=metrics,
        facts=dones[0].facts,
    )

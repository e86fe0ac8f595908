"""Decides what a parameter server does as a member of a roster. Pure.

In a global round the parameter servers average what their groups gained: each offers a cut of its
newest version, a reduction adds up what was gained since the last global weights, and each makes a
version of the new ones. The first name of the roster is the coordinator (`coordinator`) and a
member, too; the messages between the two stay in here.

Rules
- A group offers one cut for each round. The cut is durable before it is promised, and every attempt
  of that round uses it: a group's tokens are in a round or not, whatever attempt succeeds.
- Merges are held from the cut until the decision, at most `hold_s`. Training, uploads and their
  acknowledgments are not. A group that merged meanwhile adopts "late": it keeps what it gained.
- A result is durable before it is reported. Only the coordinator's decision makes it count.
- Global weights are on disk here before they are adopted. Adopting makes a version, and ends the
  cut.
- After every loss of the session the member asks for the newest decision. The answer says whether
  its cut was in the round, so nothing is merged twice and nothing is lost.

    state       event or message         -> state       effects
    any         GroupsRecovered             FREE        - (the state on disk)
    any         PeerHere                    same        AskGlobal, Ending
    FREE        Poll for its round          CUTTING     TakeCut
    FREE        Poll, and there is a cut    FREE        Promise with the same cut
    CUTTING     CutTaken                    FREE        Promise; timer "hold"
    CUTTING     CutFailed                   FREE        ResumeMerges
    FREE        View with its cut           REDUCING    StartReduction
    REDUCING    Address                     REDUCING    PassAddress
    REDUCING    ReductionDone               REPORTED    Reported
    REDUCING    ReductionFailed             FREE        Failed
    REDUCING    Dropped, PeerGone           FREE        KillReduction
    any         Decided, newer              FETCHING    KillReduction if it runs, ReceiveGlobal
    FETCHING    GlobalHeld                  ADOPTING    Adopt
    FETCHING    GlobalLost, PeerGone        FREE        AskGlobal: timer "ask", or the next session
    ADOPTING    Adopted                     FREE        ResumeMerges, AskGlobal (reports the round)
    ADOPTING    AdoptFailed                 FREE        AskGlobal at timer "ask": files are checked
    any         timer "hold"                same        ResumeMerges
    any         GroupVersion                same        VersionMade
    any         GroupEnds, later Adopted    same        Ending
    any         AllEnded, timer "end"       same        EndGroup, if it ends and needs no round
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any

from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.groups.coordinator import GroupsCoordinator
from fsl_async.roles.machine import (
    Deadlines,
    Effect,
    Event,
    Note,
    Received,
    RoleMachine,
    Send,
    TimerFired,
)
from fsl_async.roles.messages import Message

if TYPE_CHECKING:
    from fsl_async.config.settings import Config

COORDINATOR = ""
"""The peer of a member's messages."""

RETRY_S = 0.5


class MemberPhase(enum.Enum):
    """The phases of a member."""

    FREE = "free"
    CUTTING = "cutting"
    REDUCING = "reducing"
    REPORTED = "reported"
    FETCHING = "fetching"
    ADOPTING = "adopting"


BUSY = {MemberPhase.CUTTING, MemberPhase.FETCHING, MemberPhase.ADOPTING}
"""Phases in which the group's own disk or machine has to answer first."""


class GroupMember(RoleMachine):
    """The machine of a parameter server in a roster: its member, and the coordinator if it leads.

    It takes its own events and the messages of its peers: those of the coordinator, or as the
    coordinator those of members.
    """

    senders = "a coordinator"

    def __init__(self, config: Config) -> None:
        self.name = config.run.name
        self.groups = config.groups
        self.coordinator = GroupsCoordinator(config) if config.leads else None
        self.phase = MemberPhase.FREE
        self.adopted = ev.Decision(-1, 0, "", "")
        """The global weights that the group has adopted; round -1: none."""
        self.since = -1
        self.gained = False
        """Whether the group merged deltas that are in no decided round."""
        self.ends = False
        self.cut: ev.Cut | None = None
        self.is_here = self.coordinator is not None
        """Whether there is a session with the coordinator."""
        self.holds = False
        """Whether merges are held."""
        self.attempt = 0
        """The attempt that is under way, or reported."""
        self.target: msg.Decided | None = None
        self.deadlines = Deadlines()
        self.handlers = {
            ev.GroupsRecovered: lambda event, _: self._recovered(event),
            ev.PeerHere: lambda _event, _now: self._arrived(),
            ev.PeerGone: lambda event, now: self._gone(event.reason, now),
            ev.GroupVersion: lambda event, _: self._version_made(event.version),
            ev.GroupEnds: lambda _event, now: self._group_ends(now),
            ev.CutTaken: self._cut_taken,
            ev.CutFailed: self._cut_failed,
            ev.ReductionDone: lambda event, _: self._reduction_done(event),
            ev.ReductionFailed: lambda event, _: self._reduction_failed(event),
            ev.GlobalHeld: lambda event, _: self._global_held(event),
            ev.GlobalLost: self._global_lost,
            ev.Adopted: lambda event, _: self._adopted(event),
            ev.AdoptFailed: self._adopt_failed,
            msg.Poll: lambda event, _: self._poll(event.message.round),
            msg.View: lambda event, _: self._view(event.message),
            msg.Address: lambda event, _: self._address(event.message),
            msg.Dropped: lambda event, _: self._dropped(event.message),
            msg.Decided: lambda event, _: self._decided(event.message),
            msg.AllEnded: lambda _event, _now: self._all_ended(),
        }

    @property
    def round(self) -> int:
        """The round of the global weights that the group has adopted; -1: none."""
        return self.adopted.round

    # --- the two halves ---

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        times = [half.deadlines.next() for half in (self, self.coordinator) if half is not None]
        return min((time for time in times if time is not None), default=None)

    def check(self, event: Received[Any]) -> None:
        """Raise MessageError for a message that its peer may not send."""
        if self.coordinator is not None:
            self.coordinator.check(event)
        else:
            super().check(event)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out."""
        effects: list[Effect] = []
        if isinstance(event, TimerFired):
            for half in (self.coordinator, self):
                for name in half.deadlines.pop_due(now) if half is not None else ():
                    effects += half.timer(name, now)  # type: ignore[union-attr]
        elif self.coordinator is None:
            effects = super().handle(event, now)
        else:
            effects += self.coordinator.handle(event, now)
            if not isinstance(event, Received | ev.PeerHere | ev.PeerGone):
                effects += super().handle(event, now)
        return effects if self.coordinator is None else self._deliver(effects, now)

    def _deliver(self, effects: list[Effect], now: float) -> list[Effect]:
        """Give each half the messages of the other; return the other effects, in order."""
        assert self.coordinator is not None
        left: list[Effect] = []
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            if isinstance(effect, Send) and effect.peer == COORDINATOR:
                more = self.coordinator.handle(Received(self.name, effect.message), now)
            elif isinstance(effect, Send) and effect.peer == self.name:
                more = super().handle(Received(COORDINATOR, effect.message), now)
            else:
                left.append(effect)
                continue
            waiting.extendleft(reversed(more))
        return left

    def timer(self, name: str, now: float) -> list[Effect]:
        """Take one due deadline."""
        if name == "hold":
            text = f"global round {self.round} is not decided yet; this group merges again"
            return [Note(text, "warning"), *self._resume()]
        if name == "end":
            return [do.EndGroup()] if not (self.is_here or self.gained) else []
        return self._ask()

    def _recovered(self, event: ev.GroupsRecovered) -> list[Effect]:
        self.adopted = event.adopted or self.adopted
        self.since, self.gained, self.cut = event.since, event.gained, event.cut
        return self._arrived() if self.coordinator is not None else []

    # --- the session ---

    def _tell(self, message: Message) -> list[Effect]:
        return [Send(COORDINATOR, message)] if self.is_here else []

    def _ask(self) -> list[Effect]:
        return self._tell(msg.AskGlobal(self.round, self.adopted.digest, self.adopted.run))

    def _arrived(self) -> list[Effect]:
        self.is_here = True
        return [*self._ask(), *self._end()]

    def _version_made(self, version: int) -> list[Effect]:
        self.gained = True
        return [*self._tell(msg.VersionMade(version)), *self._end()]

    def _group_ends(self, now: float) -> list[Effect]:
        self.ends = True
        self._wait(now)
        return self._end()

    def _wait(self, now: float) -> None:
        """Without the coordinator, which may have ended, a group ends that needs no round."""
        if self.ends and not self.is_here and self.deadlines.when("end") is None:
            self.deadlines.set("end", now + self.groups.grace_s)

    def _end(self) -> list[Effect]:
        """Say that the group ends, and whether that needs one more round."""
        return self._tell(msg.Ending(self.gained)) if self.ends else []

    def _all_ended(self) -> list[Effect]:
        return [do.EndGroup()] if self.ends and not self.gained else []

    def _gone(self, reason: str, now: float) -> list[Effect]:
        self.is_here = False
        self._wait(now)
        effects = self._kill(reason)
        if self.phase is MemberPhase.FETCHING:
            self.phase, self.target = MemberPhase.FREE, None
        if self.phase is MemberPhase.FREE:  # after a report there may be a decision
            effects += self._resume()
        return [*effects, *self._end()]

    def _resume(self) -> list[Effect]:
        """Let the group merge, if that is held. While a cut is taken, it is answered first."""
        if not self.holds or self.phase is MemberPhase.CUTTING:
            return []
        self.holds = False
        self.deadlines.cancel("hold")
        return [do.ResumeMerges()]

    def _kill(self, reason: str) -> list[Effect]:
        """End the reduction, if one is under way."""
        if self.phase is not MemberPhase.REDUCING:
            return []
        self.phase = MemberPhase.FREE
        return [do.KillReduction(reason)]

    # --- from the poll to the report ---

    def _poll(self, number: int) -> list[Effect]:
        if self.phase in BUSY:
            return []
        if number != self.round:
            return self._ask()
        effects = self._kill("another attempt begins")
        self.phase = MemberPhase.FREE
        if self.cut is not None:
            return [*effects, self._promise(self.cut)]
        self.phase, self.holds = MemberPhase.CUTTING, True
        return [*effects, do.TakeCut(number)]

    def _promise(self, cut: ev.Cut) -> Send:
        behind = max(0, cut.round - self.since)
        promise = msg.Promise(
            cut.round, cut.version, cut.digest, cut.begin, cut.end, behind, self.groups.piece_values
        )
        return Send(COORDINATOR, promise)

    def _cut_taken(self, event: ev.CutTaken, now: float) -> list[Effect]:
        self.phase, self.cut = MemberPhase.FREE, event.cut
        if not self.is_here:
            return self._resume()
        self.deadlines.set("hold", now + self.groups.hold_s)
        return [self._promise(event.cut)]

    def _cut_failed(self, event: ev.CutFailed, now: float) -> list[Effect]:
        self.phase = MemberPhase.FREE
        text = f"no part in global round {event.round}: {event.reason}"
        return [Note(text, "warning"), *self._resume()]

    def _view(self, view: msg.View) -> list[Effect]:
        cut, shares = self.cut, view.members
        ranks = [share.name for share in shares]
        problem = ""
        if self.phase in BUSY:
            problem = f"{self.name} is {self.phase.value}"
        elif cut is None or cut.round != view.round or self.name not in ranks:
            problem = f"{self.name} has no cut for round {view.round}"
        elif shares[ranks.index(self.name)].digest != cut.digest:
            problem = f"{self.name} has another cut for round {view.round}"
        if problem:
            return [Send(COORDINATOR, msg.Failed(view.round, view.attempt, problem))]
        effects = self._kill("another attempt begins")
        self.phase, self.attempt = MemberPhase.REDUCING, view.attempt
        return [*effects, do.StartReduction(view, ranks.index(self.name))]

    def _address(self, address: msg.Address) -> list[Effect]:
        if not self._reduces(address.attempt):
            return []
        return [do.PassAddress(address.key, address.blob)]

    def _reduces(self, attempt: int) -> bool:
        return self.phase is MemberPhase.REDUCING and attempt == self.attempt

    def _dropped(self, message: msg.Dropped) -> list[Effect]:
        if message.attempt != self.attempt:
            return []
        if self.phase is MemberPhase.REPORTED:
            self.phase = MemberPhase.FREE
        return self._kill(message.reason)

    def _reduction_done(self, event: ev.ReductionDone) -> list[Effect]:
        if not self._reduces(event.attempt):
            return []
        self.phase = MemberPhase.REPORTED
        return [Send(COORDINATOR, msg.Reported(self.round, event.attempt, event.digest))]

    def _reduction_failed(self, event: ev.ReductionFailed) -> list[Effect]:
        if not self._reduces(event.attempt):
            return []
        self.phase = MemberPhase.FREE
        text = f"attempt {event.attempt} of global round {self.round} failed: {event.reason}"
        failed = msg.Failed(self.round, event.attempt, event.reason)
        return [Note(text), Send(COORDINATOR, failed)]

    # --- from the decision to the version ---

    def _decided(self, message: msg.Decided) -> list[Effect]:
        held, text = self.adopted, ""
        if held.run and message.run != held.run:
            text = (
                f"this group is of run {held.run}, and the coordinator now of run {message.run}:"
                " give this group a new --run-dir, or restore the coordinator's run directory"
            )
        elif message.round < held.round or (
            message.round == held.round and message.digest != held.digest
        ):
            text = (
                f"the coordinator is at global round {message.round} ({message.digest}), and this"
                f" group at {held.round} ({held.digest}): restore the coordinator's run directory"
            )
        if text:
            return [Note(text, "warning")]
        if message.round == self.round:
            return []
        if self.phase in {MemberPhase.CUTTING, MemberPhase.ADOPTING}:
            return []  # the promise, or the question after the adoption, gets the answer again
        effects = self._kill("the round is decided")
        self.phase, self.target = MemberPhase.FETCHING, message
        return [*effects, do.ReceiveGlobal(message.decision)]

    def _global_held(self, event: ev.GlobalHeld) -> list[Effect]:
        target = self.target
        if self.phase is not MemberPhase.FETCHING or target is None or event.round != target.round:
            return []
        self.phase = MemberPhase.ADOPTING
        return [do.Adopt(target.decision, target.counted)]

    def _global_lost(self, event: ev.GlobalLost, now: float) -> list[Effect]:
        if self.phase is not MemberPhase.FETCHING:
            return []
        self.phase, self.target = MemberPhase.FREE, None
        self.deadlines.set("ask", now + RETRY_S)
        return [Note(f"global weights {event.round} did not arrive: {event.reason}", "warning")]

    def _adopted(self, event: ev.Adopted) -> list[Effect]:
        self.adopted = event.decision
        self.since, self.gained = event.since, event.gained
        self.cut, self.target, self.phase = None, None, MemberPhase.FREE
        return [*self._resume(), *self._ask(), *self._end()]

    def _adopt_failed(self, event: ev.AdoptFailed, now: float) -> list[Effect]:
        if self.phase is not MemberPhase.ADOPTING:
            return []
        # The answer to the question leads through FETCHING, where a damaged file is replaced.
        self.phase, self.target = MemberPhase.FREE, None
        self.deadlines.set("ask", now + 10 * RETRY_S)
        text = f"global weights {event.round} could not be adopted: {event.reason}"
        return [Note(f"{text}; it is tried again", "warning")]

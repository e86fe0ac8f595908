"""Decides what a parameter server does as a member of a roster. Pure.

Rules
- A group offers one cut for each round. The cut is durable before it is promised, and every attempt
  of that round uses it: a group's tokens are in a round or not, whatever attempt succeeds.
- Merges are held from the cut until the decision, at most `hold_s`. Training, uploads and their
  acknowledgments are not. A group that merged meanwhile adopts "late": it keeps what it gained.
- A result is durable before it is reported. Only the coordinator's decision makes it count.
- Global weights are held here before they are adopted. Adopting makes a version, and ends the cut.
- After every loss of the session the member asks for the newest decision. The answer says whether
  its cut was in the round, so nothing is merged twice and nothing is lost.

    state       event or message         -> state       effects
    any         GroupsRecovered               FREE        - (the state on disk)
    any         PeerHere                    same        AskGlobal, Ending
    FREE        Poll for its round          CUTTING     TakeCut
    FREE        Poll, and there is a cut    FREE        Promise with the same cut
    CUTTING     CutTaken                    FREE        Promise; timer "hold"
    CUTTING     CutFailed                   FREE        ResumeMerges
    FREE        View with its cut           REDUCING    StartReduction
    REDUCING    Address                     REDUCING    PassAddress
    REDUCING    ReductionDone                    REPORTED    Reported
    REDUCING    ReductionFailed                  FREE        Failed
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
from typing import TYPE_CHECKING

from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.machine import Deadlines, Effect, Note, RoleMachine, Send
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


class GroupMember(RoleMachine):
    """The state of one member. It takes its own events, and the coordinator's messages."""

    senders = "a coordinator"

    def __init__(self, config: Config) -> None:
        self.name = config.run.name
        self.groups = config.groups
        self.phase = MemberPhase.FREE
        self.round = -1
        """Of the global weights that the group has adopted."""
        self.digest = ""
        self.run = ""
        self.since = -1
        self.gained = False
        """Whether the group merged what is in no decided round."""
        self.ends = False
        self.cut: ev.Cut | None = None
        self.is_here = False
        """Whether there is a session with the coordinator."""
        self.holds = False
        """Whether merges are held."""
        self.attempt = 0
        """The one under way, or reported."""
        self.target: msg.Decided | None = None
        self.deadlines = Deadlines()
        self.handlers = {
            ev.GroupsRecovered: self._recovered,
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

    def timer(self, name: str, now: float) -> list[Effect]:
        """Take one due deadline."""
        if name == "hold":
            text = f"global round {self.round} is not decided yet; this group merges again"
            return [Note(text, "warning"), *self._resume()]
        if name == "end":
            return [do.EndGroup()] if not (self.is_here or self.gained) else []
        return self._ask()

    def _recovered(self, event: ev.GroupsRecovered, now: float) -> list[Effect]:
        self.round, self.digest, self.run = event.round, event.digest, event.run
        self.since, self.gained, self.cut = event.since, event.gained, event.cut
        return []

    # --- the session ---

    def _tell(self, message: Message) -> list[Effect]:
        return [Send(COORDINATOR, message)] if self.is_here else []

    def _ask(self) -> list[Effect]:
        return self._tell(msg.AskGlobal(self.round, self.digest, self.run))

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
        if not self.ends:
            return []
        return self._tell(msg.Ending(self.gained))

    def _all_ended(self) -> list[Effect]:
        return [do.EndGroup()] if self.ends and not self.gained else []

    def _gone(self, reason: str, now: float) -> list[Effect]:
        self.is_here = False
        self._wait(now)
        effects: list[Effect] = []
        if self.phase is MemberPhase.REDUCING:
            effects += self._kill(reason)
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
        self.phase = MemberPhase.FREE
        return [do.KillReduction(reason)]

    # --- from the poll to the report ---

    def _poll(self, number: int) -> list[Effect]:
        if self.phase in {MemberPhase.CUTTING, MemberPhase.FETCHING, MemberPhase.ADOPTING}:
            return []
        if number != self.round:
            return self._ask()
        effects: list[Effect] = []
        if self.phase is MemberPhase.REDUCING:  # that attempt is over at the coordinator
            effects += self._kill("another attempt begins")
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
        ranks = [share.name for share in view.members]
        if self.phase in {MemberPhase.CUTTING, MemberPhase.FETCHING, MemberPhase.ADOPTING}:
            return self._refuse(view, f"{self.name} is {self.phase.value}")
        cut = self.cut
        if cut is None or cut.round != view.round or self.name not in ranks:
            return self._refuse(view, f"{self.name} has no cut for round {view.round}")
        rank = ranks.index(self.name)
        if view.members[rank].digest != cut.digest:
            return self._refuse(view, f"{self.name} has another cut for round {view.round}")
        effects: list[Effect] = []
        if self.phase is MemberPhase.REDUCING:
            effects += self._kill("another attempt begins")
        self.phase, self.attempt = MemberPhase.REDUCING, view.attempt
        return [*effects, do.StartReduction(view, rank)]

    def _refuse(self, view: msg.View, reason: str) -> list[Effect]:
        return [Send(COORDINATOR, msg.Failed(view.round, view.attempt, reason))]

    def _address(self, address: msg.Address) -> list[Effect]:
        runs = self.phase is MemberPhase.REDUCING and address.attempt == self.attempt
        return [do.PassAddress(address.key, address.blob)] if runs else []

    def _dropped(self, message: msg.Dropped) -> list[Effect]:
        if message.attempt != self.attempt:
            return []
        if self.phase is MemberPhase.REPORTED:
            self.phase = MemberPhase.FREE
        return self._kill(message.reason) if self.phase is MemberPhase.REDUCING else []

    def _reduction_done(self, event: ev.ReductionDone) -> list[Effect]:
        if self.phase is not MemberPhase.REDUCING or event.attempt != self.attempt:
            return []
        self.phase = MemberPhase.REPORTED
        return [Send(COORDINATOR, msg.Reported(self.round, event.attempt, event.digest))]

    def _reduction_failed(self, event: ev.ReductionFailed) -> list[Effect]:
        if self.phase is not MemberPhase.REDUCING or event.attempt != self.attempt:
            return []
        self.phase = MemberPhase.FREE
        text = f"attempt {event.attempt} of global round {self.round} failed: {event.reason}"
        failed = msg.Failed(self.round, event.attempt, event.reason)
        return [Note(text), Send(COORDINATOR, failed)]

    # --- from the decision to the version ---

    def _decided(self, message: msg.Decided) -> list[Effect]:
        if self.run and message.run != self.run:
            text = (
                f"this group is of run {self.run}, and the coordinator now of run {message.run}:"
                " give this group a new --run-dir, or restore the coordinator's run directory"
            )
            return [Note(text, "warning")]
        if message.round < self.round or (
            message.round == self.round and message.digest != self.digest
        ):
            text = (
                f"the coordinator is at global round {message.round} ({message.digest}), and this"
                f" group at {self.round} ({self.digest}): restore the coordinator's run directory"
            )
            return [Note(text, "warning")]
        if message.round == self.round:
            return []
        if self.phase in {MemberPhase.CUTTING, MemberPhase.ADOPTING}:
            return []  # the promise, or the question after the adoption, gets the answer again
        effects: list[Effect] = []
        if self.phase is MemberPhase.REDUCING:
            effects += self._kill("the round is decided")
        self.phase, self.target = MemberPhase.FETCHING, message
        receive = do.ReceiveGlobal(message.round, message.attempt, message.digest)
        return [*effects, receive]

    def _global_held(self, event: ev.GlobalHeld) -> list[Effect]:
        if self.phase is not MemberPhase.FETCHING or self.target is None:
            return []
        if event.round != self.target.round:
            return []
        self.phase, target = MemberPhase.ADOPTING, self.target
        decision = ev.Decision(target.round, target.attempt, target.digest, target.run)
        return [do.Adopt(decision, target.counted)]

    def _global_lost(self, event: ev.GlobalLost, now: float) -> list[Effect]:
        if self.phase is not MemberPhase.FETCHING:
            return []
        self.phase, self.target = MemberPhase.FREE, None
        self.deadlines.set("ask", now + RETRY_S)
        return [Note(f"global weights {event.round} did not arrive: {event.reason}", "warning")]

    def _adopted(self, event: ev.Adopted) -> list[Effect]:
        made = event.decision
        self.round, self.digest, self.run = made.round, made.digest, made.run
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

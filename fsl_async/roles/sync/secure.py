"""Decides about secure sums at the parameter server, which carries what sites seal. Pure.

While clients train a round, those called agree on keys; each then sends its delta under masks that
only the sum is free of (`fsl_async.secure`). A delta is accepted by its client's point of view when
a version has it: until then the client can take it back into its unsent work.

    stage       event or message                     -> stage      effects
    IDLE        a round is called                       KEYS       Send SecureCall
    KEYS        SecureKey of all, timer "secure"        SHARES     Send SecureSet; the rest is not
                                                                   waited for
    KEYS        fewer than three                        IDLE       void
    SHARES      SecureShares of all                     MASKED     Send SecureShares to each
    SHARES      a site left, timer "secure"             KEYS       a new attempt with the others
    MASKED      the round is complete                   FIXING     KeepSum: the survivors
    FIXING      KeepSum is done                         ASKING     Send Unmask to the survivors
    ASKING      Unmasked of enough                      SUMMING    OpenSum
    ASKING      timer "secure"                          FIXING     KeepSum: of none; then void
    SUMMING     SumOpened                               SUMMED     Commit; with a problem as above
    SUMMED      VersionCommitted                        IDLE       Send Accepted
    any         a site of the set is back               same       what it may have missed again
    IDLE        Recovered with a kept sum               ASKING     as FIXING; else void

Void: no sum is opened. The deltas are excluded from the run and declined, and the round closes.
After a restart only a sum whose survivors were kept goes on: sites answer one set of survivors.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import define, field

from fsl_async.roles.machine import Deadlines, Done, Effect, Note, Received, Send
from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import MASKS, Delta, StoredDelta
from fsl_async.roles.sync.ps_state import Member, Phase, Round
from fsl_async.roles.sync.roster import LEAST, MOST, Answers, Roster, lattice_of

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.roles.sync.rounds import RoundCoordinator

SETUP_S = 30.0
"""How long keys, and then shares, are waited for: clients train meanwhile."""
ANSWER_S = 60.0


class Stage(enum.Enum):
    """How far the sum of the open round is."""

    IDLE = "idle"
    KEYS = "keys"
    SHARES = "shares"
    MASKED = "masked"
    FIXING = "fixing"
    ASKING = "asking"
    SUMMING = "summing"
    SUMMED = "summed"


@define(eq=False)
class SecureSums:
    """The sums of a run, one after the other. It shares the coordinator's members and deltas."""

    _rounds: RoundCoordinator
    _deadlines: Deadlines
    _config: Config
    _run: str
    _means: deque[float] = field(init=False)
    """Rms of the last mean of the same weights, and of later ones: in rolora factors alternate."""
    stage: Stage = Stage.IDLE
    roster: Roster | None = None
    _call: msg.SecureCall = field(factory=lambda: msg.SecureCall(-1, 0))
    _expected: set[str] = field(factory=set)
    _keys: dict[str, tuple[bytes, bytes]] = field(factory=dict)
    _incarnations: dict[str, int] = field(factory=dict)
    _sealed: dict[str, dict[str, bytes]] = field(factory=dict)
    """Receiver -> sender -> the shares for it."""
    _survivors: tuple[str, ...] = ()
    _problem: str = ""
    _answers: dict[str, dict[str, bytes]] = field(factory=dict)
    """Site -> holder -> its share."""
    _answered: set[str] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        kinds = 2 if self._config.tune.rule == "rolora" else 1
        self._means = deque([0.0] * kinds, kinds)

    @property
    def _members(self) -> dict[str, Member]:
        return self._rounds.members

    # --- keys and shares ---

    def begin(self, number: int, names: Iterable[str], now: float) -> list[Effect]:
        """Ask clients for keys, for a new attempt at the sum of a round."""
        self.stage, self._call = Stage.KEYS, msg.SecureCall(number, self._call.attempt + 1)
        self._expected, self.roster = set(names), None
        self._keys, self._sealed = {}, {}
        self._deadlines.set("secure", now + SETUP_S)
        return [Send(name, self._call) for name in sorted(self._expected)]

    def key_sent(self, event: Received[msg.SecureKey], now: float) -> list[Effect]:
        """Take the keys of a site."""
        sent = event.message
        if not self._is_open(Stage.KEYS, sent) or event.peer not in self._expected:
            return []
        self._keys[event.peer] = sent.site, sent.key
        return self._fix(now) if self._expected <= self._keys.keys() else []

    def _fix(self, now: float) -> list[Effect]:
        names = sorted(self._keys)[:MOST]
        if len(names) < LEAST:
            return self.void(f"{counted(len(names), 'client')} sent keys for a sum", now)
        tune = self._config.tune
        of_scalars = tune.method == "zeroth"
        step, bits = lattice_of(tune.secure_bits, self._means[0], of_scalars=of_scalars)
        members = [[name, *self._keys[name]] for name in names]
        self.roster = roster = Roster(self._call.round, self._call.attempt, step, bits, members)
        self._incarnations = {name: self._members[name].incarnation for name in names}
        self.stage = Stage.SHARES
        self._deadlines.set("secure", now + SETUP_S)
        made = msg.SecureSet(roster)
        return [*(Send(name, made) for name in names), *self._without_others(now)]

    def _without_others(self, now: float) -> list[Effect]:
        """Stop waiting for the deltas of clients that are not in the set."""
        open_ = self._rounds.round
        if open_ is None or self.roster is None:
            return []
        others = [name for name in open_.missing() if name not in self.roster.keys]
        open_.dismiss(others)
        return self._rounds.evaluate(now) if others else []

    def shares_sent(self, event: Received[msg.SecureShares], now: float) -> list[Effect]:
        """Take the shares that a site has sealed for its neighbours."""
        peer, sealed = event.peer, dict(event.message.sealed)
        if not self._is_open(Stage.SHARES, event.message) or self.roster is None:
            return []
        if peer not in self.roster.keys or sealed.keys() != set(self.roster.neighbours(peer)):
            return []
        for name, text in sealed.items():
            self._sealed.setdefault(name, {})[peer] = text
        names = self.roster.ring
        if any(len(self._sealed.get(one, ())) < len(self.roster.neighbours(one)) for one in names):
            return []
        self.stage = Stage.MASKED
        self._deadlines.cancel("secure")
        return [Send(name, self._inbox(name)) for name in names if name in self._members]

    def _inbox(self, name: str) -> Message:
        sealed = [[sender, text] for sender, text in sorted(self._sealed[name].items())]
        return msg.SecureShares(self._call.round, self._call.attempt, sealed)

    def left(self, peer: str, now: float) -> list[Effect]:
        """Go on without a client whose session ended."""
        self._expected.discard(peer)
        if self.stage is Stage.KEYS:
            self._keys.pop(peer, None)
            return self._fix(now) if self._expected <= self._keys.keys() else []
        if self.stage is Stage.SHARES and self.roster is not None and peer in self.roster.keys:
            return self.begin(self._call.round, self.roster.keys.keys() - {peer}, now)
        return []

    def rejoined(self, peer: str, incarnation: int, now: float) -> list[Effect]:
        """Send a client that attached again what it may have missed."""
        open_ = self._rounds.round
        awaited = open_ is not None and open_.awaits(peer, incarnation)
        if self.stage is Stage.KEYS and awaited:
            self._expected.add(peer)
            return [Send(peer, self._call)]
        if self._incarnations.get(peer, incarnation) != incarnation or self.roster is None:
            return []  # another process, which has none of the keys
        if self.stage is Stage.ASKING and peer in self._survivors and peer not in self._answered:
            return [Send(peer, self._question())]
        if peer in self.roster.keys:
            return [Send(peer, self._inbox(peer))] if self.stage is Stage.MASKED else []
        return self._without_others(now) if awaited else []

    # --- the sum ---

    def objection(self, delta: Delta) -> tuple[str, str] | None:
        """Why a delta cannot be part of the open sum, as a code and a sentence; None: it can."""
        if self.stage is Stage.MASKED and self._is_under_masks(delta):
            return None
        return "void", "it is under the masks of no open sum, and its client keeps it as unsent"

    def _is_under_masks(self, delta: Delta) -> bool:
        roster, key = self.roster, delta.key
        if roster is None or key.base != roster.round or key.client not in roster.keys:
            return False
        return delta.facts.get(MASKS) == roster.number(self._run)

    def close(self, now: float) -> list[Effect]:
        """The round is complete: open the sum of the deltas that are here."""
        survivors = sorted({key.client for key in self._rounds.deltas.pending})
        roster = self.roster
        if self.stage is not Stage.MASKED or roster is None:
            return self.void("its sites had not agreed on keys", now)
        if objection := roster.objection(survivors):
            return self.void(objection, now)
        self._rounds.phase = Phase.MERGING
        self._survivors, self.stage = tuple(survivors), Stage.FIXING
        self._answers, self._answered = {}, set()
        self._deadlines.cancel("round")
        return [do.KeepSum(roster, self._survivors)]

    def kept(self, event: Done[do.KeepSum], now: float) -> list[Effect]:
        """The survivors are on disk: ask them what opens the sum, if there is to be one."""
        if not event.of.survivors:
            return self._void(self._problem, now)
        self.stage = Stage.ASKING
        self._deadlines.set("secure", now + ANSWER_S)
        here = (name for name in self._survivors if name in self._members)
        return [Send(name, self._question()) for name in here]

    def _question(self) -> Message:
        return msg.Unmask(self._call.round, self._call.attempt, list(self._survivors))

    def unmasked(self, event: Received[msg.Unmasked], now: float) -> list[Effect]:
        """Take a survivor's shares, and open the sum once there are enough."""
        peer, roster = event.peer, self.roster
        fresh = peer in self._survivors and peer not in self._answered
        if not self._is_open(Stage.ASKING, event.message) or roster is None or not fresh:
            return []
        self._answered.add(peer)
        needed = roster.needed(self._survivors)
        for name, share in event.message.shares:
            if name in needed and peer in roster.holders(name):
                self._answers.setdefault(name, {})[peer] = share
        if any(len(self._answers.get(one, ())) < roster.threshold for one in needed):
            return []
        self.stage = Stage.SUMMING
        self._deadlines.cancel("secure")
        keys = tuple(self._rounds.deltas.pending)
        return [do.OpenSum(keys, Answers(roster, self._survivors, self._answers))]

    def opened(self, event: ev.SumOpened, now: float) -> list[Effect]:
        """Make the version of the sum."""
        if self.stage is not Stage.SUMMING:
            return []
        if event.problem:
            return self.void(event.problem, now)
        self.stage = Stage.SUMMED
        self._means.append(event.rms)
        sites = counted(len(self._survivors), "client")
        note = Note(f"round {self._call.round}: the sum of {sites} is opened, and no delta")
        return [note, *self._rounds.merge(now)]

    def committed(self) -> list[Effect]:
        """Accept the deltas that the version has; they are merging until then."""
        keys = [one.key for one in self._rounds.deltas.merging]
        self.over()
        return [Send(key.client, msg.Accepted(key)) for key in keys if key.client in self._members]

    def void(self, reason: str, now: float) -> list[Effect]:
        """Open no sum of this round: clients take their deltas back.

        A restarted parameter server must not open it after all, so that is on disk before.
        """
        if self.stage in {Stage.ASKING, Stage.SUMMING} and self.roster is not None:
            self.stage, self._survivors, self._problem = Stage.FIXING, (), reason
            return [do.KeepSum(self.roster, ())]
        return self._void(reason, now)

    def _void(self, reason: str, now: float) -> list[Effect]:
        deltas = self._rounds.deltas
        text = f"no sum: {reason}"
        pending = list(deltas.pending.values())
        effects = [effect for one in pending for effect in self._decline(one, text)]
        return [*effects, *self._rounds.close(text, now)]

    def _decline(self, stored: StoredDelta, text: str) -> list[Effect]:
        key = stored.key
        self._rounds.deltas.pending.pop(key, None)
        self._rounds.deltas.settled.settle(key, "quarantined")
        answer = [Send(key.client, msg.Declined(key, "void", text))]
        return [do.Quarantine(key, text), *(answer if key.client in self._members else [])]

    def over(self) -> None:
        """The round is over."""
        self.stage, self.roster = Stage.IDLE, None
        self._deadlines.cancel("secure")

    def timer(self, now: float) -> list[Effect]:
        """Go on without sites that have not answered in time."""
        if self.stage is Stage.KEYS:
            return self._fix(now)
        if self.stage is Stage.SHARES and self.roster is not None:
            senders = {name for found in self._sealed.values() for name in found}
            names = [name for name in self.roster.ring if name in senders & self._members.keys()]
            return self.begin(self._call.round, names, now)
        if self.stage is Stage.ASKING:
            answered = counted(len(self._answered), "client")
            return self.void(f"{answered} of {len(self._survivors)} answered", now)
        return []

    def recovered(self, event: ev.Recovered, now: float) -> list[Effect]:
        """Ask again for a sum whose survivors are known, and decline other pending deltas."""
        kept, mine = event.sum, dict[str, StoredDelta]()
        if kept is not None and kept.roster.round == event.version:
            self.roster, self._survivors = kept.roster, kept.survivors
            found = (one for one in event.pending if self._is_under_masks(one.delta))
            mine = {one.key.client: one for one in found if one.key.client in kept.survivors}
        if kept is None or not mine or mine.keys() != set(kept.survivors):
            self.over()
            return [one for stored in event.pending for one in self._decline(stored, "restarted")]
        self._call = msg.SecureCall(kept.roster.round, kept.roster.attempt)
        self.stage, self._rounds.phase = Stage.ASKING, Phase.MERGING
        self._rounds.round = Round(event.version, now, ANSWER_S, {})
        self._deadlines.cancel("sync")
        self._deadlines.set("secure", now + self._config.session.drain_s + ANSWER_S)
        for stored in mine.values():
            self._rounds.deltas.acknowledge(stored)
        others = (stored for stored in event.pending if stored not in mine.values())
        return [one for stored in others for one in self._decline(stored, "restarted")]

    def _is_open(self, stage: Stage, sent: msg.AnyOfSum) -> bool:
        at = self._call.round, self._call.attempt
        return self.stage is stage and (sent.round, sent.attempt) == at

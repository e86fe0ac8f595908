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
    MASKED      SharesRefused by most                   KEYS       a new attempt without that site
    MASKED      the round is complete                   FIXING     KeepSum: the survivors
    FIXING      KeepSum is done                         ASKING     Send Unmask to the survivors
    ASKING      Unmasked of enough                      SUMMING    OpenSum
    ASKING      timer "secure"                          FIXING     KeepSum: of none; then void
    SUMMING     SumOpened                               same       Commit; with a problem as above
    SUMMING     VersionCommitted                        IDLE       Send Accepted
    any         a site of the set is back               same       what it may have missed again
    IDLE        Recovered with a kept sum               ASKING     as FIXING; else void

Void: no sum is opened. The deltas are excluded from the run and declined, and the round closes.
After a restart only a sum whose survivors were kept goes on: sites answer one set of survivors.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
    _awaited: set[str] = field(factory=set)
    """Sites that are to answer in this stage."""
    _sent: dict[str, dict[str, bytes]] = field(factory=dict)
    """Site -> what it has sent in this stage: its keys, or the shares of others, by name."""
    _refused_by: dict[str, set[str]] = field(factory=dict)
    """Site -> the neighbours that cannot open what it has sealed."""
    _survivors: tuple[str, ...] = ()
    _problem: str = ""

    def __attrs_post_init__(self) -> None:
        kinds = 2 if self._config.tune.rule == "rolora" else 1
        self._means = deque([0.0] * kinds, kinds)

    @property
    def _members(self) -> dict[str, Member]:
        return self._rounds.members

    def _ask(
        self, stage: Stage, names: Iterable[str], message: Message, until: float
    ) -> list[Effect]:
        """Begin a stage in which these sites answer a message."""
        self.stage, self._awaited, self._sent, self._refused_by = stage, set(names), {}, {}
        self._deadlines.set("secure", until)
        return [Send(name, message) for name in sorted(self._awaited & self._members.keys())]

    def _takes(self, stage: Stage, event: Received[Any]) -> bool:
        """Whether a message is the first answer of a site in this stage."""
        is_open = self.stage is stage and event.message.attempted == self._call.attempted
        return is_open and event.peer in self._awaited and event.peer not in self._sent

    # --- keys and shares ---

    def begin(self, number: int, names: Iterable[str], now: float) -> list[Effect]:
        """Ask clients for keys, for a new attempt at the sum of a round."""
        self._call, self.roster = msg.SecureCall(number, self._call.attempt + 1), None
        return self._ask(Stage.KEYS, names, self._call, now + SETUP_S)

    def key_sent(self, event: Received[msg.SecureKey], now: float) -> list[Effect]:
        """Take the keys of a site."""
        if not self._takes(Stage.KEYS, event):
            return []
        self._sent[event.peer] = {"site": event.message.site, "key": event.message.key}
        return self._fix(now) if self._awaited <= self._sent.keys() else []

    def _fix(self, now: float) -> list[Effect]:
        names = sorted(self._sent)[:MOST]
        if len(names) < LEAST:
            return self.void(f"{counted(len(names), 'client')} sent keys for a sum", now)
        tune = self._config.tune
        of_scalars = tune.method == "zeroth"
        step, bits = lattice_of(tune.secure_bits, self._means[0], of_scalars=of_scalars)
        members = [[name, *self._sent[name].values()] for name in names]
        self.roster = roster = Roster(self._call.round, self._call.attempt, step, bits, members)
        told = self._ask(Stage.SHARES, names, msg.SecureSet(roster), now + SETUP_S)
        return [*told, *self._without_others(now)]

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
        peer, sealed, roster = event.peer, dict(event.message.shares), self.roster
        is_first = self._takes(Stage.SHARES, event)
        if roster is None or not is_first or sealed.keys() != set(roster.neighbours(peer)):
            return []
        self._sent[peer] = sealed
        if self._awaited > self._sent.keys():
            return []
        self.stage = Stage.MASKED
        self._deadlines.cancel("secure")
        return [Send(name, self._inbox(name)) for name in roster.ring if name in self._members]

    def _inbox(self, name: str) -> Message:
        """Return the shares that others have sealed for a site."""
        sealed = [[peer, rows[name]] for peer, rows in sorted(self._sent.items()) if name in rows]
        return msg.SecureShares(self._call.round, self._call.attempt, sealed)

    def refused(self, event: Received[msg.SharesRefused], now: float) -> list[Effect]:
        """Leave a site out of a new attempt if most of its neighbours cannot open its shares."""
        peer, roster, open_ = event.peer, self.roster, self._rounds.round
        is_open = self.stage is Stage.MASKED and event.message.attempted == self._call.attempted
        if roster is None or open_ is None or not is_open or peer not in roster.keys:
            return []
        for name in set(event.message.sites).intersection(roster.neighbours(peer)):
            self._refused_by.setdefault(name, set()).add(peer)
        wrong = [
            name
            for name, by in sorted(self._refused_by.items())
            if 2 * len(by) > len(roster.neighbours(name))
        ]
        if not wrong:
            return []
        text = f"the shares that {', '.join(wrong)} sealed for a secure sum cannot be opened"
        note = Note(f"{text}: it is left out", "warning", {"alarm": "shares", "client": wrong[0]})
        # Deltas that came are under masks of this attempt.
        effects = [note, *self._decline_pending(text)]
        names = roster.keys.keys() & set(open_.missing()) - set(wrong)
        return [*effects, *self.begin(self._call.round, names, now)]

    def left(self, peer: str, now: float) -> list[Effect]:
        """Go on without a client whose session ended."""
        if self.stage is Stage.KEYS:
            self._awaited.discard(peer)
            self._sent.pop(peer, None)
            return self._fix(now) if self._awaited <= self._sent.keys() else []
        if self.stage is Stage.SHARES and peer in self._awaited:
            return self.begin(self._call.round, self._awaited - {peer}, now)
        return []

    def rejoined(self, peer: str, incarnation: int, now: float) -> list[Effect]:
        """Send a client that attached again what it may have missed."""
        open_ = self._rounds.round
        if open_ is None or open_.asked.get(peer, incarnation) != incarnation:
            return []  # another process, which has none of the keys
        awaited = open_.awaits(peer, incarnation)
        if self.stage is Stage.KEYS and awaited:
            self._awaited.add(peer)
            return [Send(peer, self._call)]
        if self.roster is None:
            return []
        if self.stage is Stage.ASKING and peer in self._awaited - self._sent.keys():
            return [Send(peer, self._question())]
        if peer in self.roster.keys:
            return [Send(peer, self._inbox(peer))] if self.stage is Stage.MASKED else []
        return self._without_others(now) if awaited else []

    # --- the sum ---

    def objection(self, delta: Delta) -> tuple[str, str] | None:
        """Why a delta cannot be part of the open sum, as a code and a sentence; None: it can."""
        if self.stage is Stage.MASKED and self._is_under_masks(delta):
            return None
        return "void", "it is under the masks of no open sum"

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
        self._deadlines.cancel("round")
        return [do.KeepSum(roster, self._survivors)]

    def kept(self, event: Done[do.KeepSum], now: float) -> list[Effect]:
        """The survivors are on disk: ask them what opens the sum, if there is to be one."""
        if not event.of.survivors:
            return self._void(self._problem, now)
        return self._ask(Stage.ASKING, self._survivors, self._question(), now + ANSWER_S)

    def _question(self) -> Message:
        return msg.Unmask(self._call.round, self._call.attempt, list(self._survivors))

    def unmasked(self, event: Received[msg.Unmasked], now: float) -> list[Effect]:
        """Take a survivor's shares, and open the sum once there are enough."""
        peer, roster = event.peer, self.roster
        if roster is None or not self._takes(Stage.ASKING, event):
            return []
        found: dict[str, dict[str, bytes]] = {one: {} for one in roster.needed(self._survivors)}
        shares = dict(event.message.shares)
        held = (one for one in shares.keys() & found.keys() if peer in roster.holders(one))
        self._sent[peer] = {one: shares[one] for one in held}
        for holder, rows in self._sent.items():
            for one, share in rows.items():
                found[one][holder] = share
        if any(len(one) < roster.threshold for one in found.values()):
            return []
        self.stage = Stage.SUMMING
        self._deadlines.cancel("secure")
        keys = tuple(self._rounds.deltas.pending)
        return [do.OpenSum(keys, Answers(roster, self._survivors, found))]

    def opened(self, event: ev.SumOpened, now: float) -> list[Effect]:
        """Make the version of the sum."""
        if event.problem:
            return self.void(event.problem, now)
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
        """Open no sum of this round: its deltas are in no version.

        A restarted parameter server must not open it after all, so that is on disk before.
        """
        if self.stage in {Stage.ASKING, Stage.SUMMING} and self.roster is not None:
            self.stage, self._survivors, self._problem = Stage.FIXING, (), reason
            return [do.KeepSum(self.roster, ())]
        return self._void(reason, now)

    def _void(self, reason: str, now: float) -> list[Effect]:
        text = f"no sum: {reason}"
        return [*self._decline_pending(text), *self._rounds.close(text, now)]

    def _decline_pending(self, text: str) -> list[Effect]:
        pending = list(self._rounds.deltas.pending.values())
        return [effect for one in pending for effect in self._decline(one, text)]

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
        if self.stage is Stage.SHARES:
            return self.begin(self._call.round, self._sent.keys() & self._members.keys(), now)
        if self.stage is Stage.ASKING:
            answered = counted(len(self._sent), "client")
            return self.void(f"{answered} of {len(self._survivors)} answered", now)
        return []

    def recovered(self, event: ev.Recovered, now: float) -> list[Effect]:
        """Ask again for a sum whose survivors are known, and decline other pending deltas."""
        kept, mine = event.sum, list[StoredDelta]()
        if kept is not None and kept.roster.round == event.version:
            self.roster, self._survivors = kept.roster, kept.survivors
            found = (one for one in event.pending if self._is_under_masks(one.delta))
            mine = [one for one in found if one.key.client in kept.survivors]
        is_whole = kept is not None and 0 < len(mine) == len(kept.survivors)
        others = (one for one in event.pending if not is_whole or one not in mine)
        declined = [effect for one in others for effect in self._decline(one, "restarted")]
        if kept is None or not is_whole:
            self.over()
            return declined
        self._call = msg.SecureCall(kept.roster.round, kept.roster.attempt)
        self._rounds.phase = Phase.MERGING
        self._rounds.round = Round(event.version, now, ANSWER_S, {})
        self._deadlines.cancel("sync")
        for stored in mine:
            self._rounds.deltas.acknowledge(stored)
        until = now + self._config.session.drain_s + ANSWER_S
        return [*declined, *self._ask(Stage.ASKING, self._survivors, self._question(), until)]

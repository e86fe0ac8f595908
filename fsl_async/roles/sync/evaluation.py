"""Asks a run's evaluator about the deltas of a round, and decides which of them count. Pure.

    merge ordered    the evaluator is here     Send Evaluate, SendDelta of each; timer "evaluator"
                     it is not, or it owes     merge at once; all deltas count. It owes until it has
                                               scored all, or holds a later version
    Score            of a key asked about      keep it; merge once all have one
    timer            "evaluator"               merge; deltas without a score count

A delta hurts if the mean of the round is better without it by more than a setting allows, or if it
alone raises the loss by more than another one and the mean is not worse without it. The worst ones
are refused, at most half of those asked about: so many can be kept out by an evaluator that lies,
or whose records are no measure. It can do nothing else to a run (docs/adr/0173).

It is asked about at most `MOST_OF_ONE` deltas of a client. More of them wait for the next version:
else a client could send so many that none is scored in time, or that its worst one is not tried.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import field, mutable

from fsl_async.roles.machine import Deadlines, Effect, Note, Received, Send
from fsl_async.roles.phrasing import MessageThrottle
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import EVALUATE, ORDER, DeltaKey, Score
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.roles.sync.ps_state import Member

if TYPE_CHECKING:
    from fsl_async.config.settings import GuardConfig

TIMER = "evaluator"
MOST_OF_ONE = 2
"""Deltas of a client in a question: an honest one has a late one and one of the round."""
_LEAST_LOSS = 1e-300
"""Stands for a limit of 0: any harm is more."""


@mutable
class Evaluation:
    """It shares the machine's members, deltas and deadlines; "evaluator" is its own."""

    limits: GuardConfig
    members: dict[str, Member]
    deltas: Deltas
    deadlines: Deadlines
    least_clients: int = 1
    """That the aggregation rule needs."""
    is_open: bool = False
    """Whether a merge waits for scores."""
    only: frozenset[DeltaKey] | None = None
    """Deltas that were pending when it was asked, which alone are merged; None: it was not."""
    _version: int = -1
    """That it was asked about last."""
    _asked: tuple[DeltaKey, ...] = ()
    _owed: set[DeltaKey] = field(factory=set)
    """Deltas of the last question that it has not scored, in its present session."""
    _given: dict[DeltaKey, msg.Score] = field(factory=dict)
    _throttle: MessageThrottle = field(factory=MessageThrottle)

    def ask(self, now: float) -> list[Effect]:
        """Ask about the pending deltas, before they are merged. Then `is_open`, or it is not."""
        name, version = self.limits.evaluator, self.deltas.version
        if not name or version == self._version:
            return []  # a merge that failed is tried again with the same scores
        self.only, self._given = None, {}
        member = self.members.get(name)
        is_here = member is not None and member.attached
        # One that has moved on scores the version before no more: it was late, or could not.
        owes = bool(self._owed) and member is not None and member.version <= self._version
        if not is_here or owes:
            why = "owes an answer" if is_here else "is not here"
            more = self._throttle.lets(why, now)
            text = f"the evaluator {name} {why}: all deltas of version {version} count"
            return [] if more is None else [Note(text + more, "warning")]
        pending = self.deltas.pending
        of_client, untried = Counter[str](), set[DeltaKey]()
        asked = list[DeltaKey]()
        for key, one in pending.items():
            if one.delta.facts.get(ORDER) == 0:
                continue
            of_client[key.client] += 1
            is_asked = of_client[key.client] <= MOST_OF_ONE and len(asked) < msg.MOST_SCORED
            asked.append(key) if is_asked else untried.add(key)
        self._asked = tuple(asked)
        if not self._asked:
            return []
        self.is_open, self._version = True, version
        self.only, self._owed = frozenset(pending.keys() - untried), set(self._asked)
        self.deadlines.set(TIMER, now + self.limits.evaluator_grace_s)
        return self._question()

    def _question(self) -> list[Effect]:
        name, deltas = self.limits.evaluator, self.deltas
        shares = zip(self._asked, deltas.shares(self._asked), strict=True)
        question = msg.Evaluate(self._version, [[key.text, share] for key, share in shares])
        sent = (do.SendDelta(name, deltas.pending[key].delta) for key in self._asked)
        return [Send(name, question), *sent]

    def joined(self, peer: str) -> list[Effect]:
        """Begin a session of the evaluator: it owes what is open only, and is asked that again."""
        if peer != self.limits.evaluator:
            return []
        self._owed = set(self._asked) - self._given.keys() if self.is_open else set()
        return self._question() if self.is_open else []

    def scored(self, event: Received[msg.Score]) -> bool:
        """Take a score. Returns whether it was the last one that a merge waited for."""
        score = event.message
        member = self.members.get(event.peer)
        if member is None or member.duty != EVALUATE or score.version != self._version:
            return False
        if score.key not in self._owed:
            return False
        self._owed.discard(score.key)
        if self.is_open:  # one that comes late decides nothing
            self._given[score.key] = score
        return self.is_open and not self._owed

    def close(self) -> list[Effect]:
        """Stop waiting. Returns notes on what was decided."""
        self.is_open = False
        self.deadlines.cancel(TIMER)
        name, given, asked = self.limits.evaluator, self._given, len(self._asked)
        hurting, lines = sum(self._harm(one) > 1.0 for one in given.values()), []
        if len(given) < asked:
            text = f"the evaluator {name} scored {len(given)} of {asked} deltas in time"
            lines.append(f"{text}; the others count")
        if hurting > self._most:
            text = f"the evaluator {name} finds {hurting} of {asked} deltas harmful, too many"
            lines.append(f"{text} to refuse: the worst {self._most} are")
        lines += [
            f"delta {key.text} has no weight: to the evaluator {name} it alone adds {one.alone:.3g}"
            f" to a loss of {one.loss:.3g}, and the others are better without it by"
            f" {one.left_out:.3g}"
            for key, one in self.scores().items()
            if one.refused
        ]
        return [Note(line, "warning") for line in lines]

    def scores(self) -> dict[DeltaKey, Score]:
        """The scores of the version that is made next, with what follows from them."""
        if self._version != self.deltas.version:
            return {}
        worst = sorted(self._given.values(), key=self._harm, reverse=True)[: self._most]
        refused = {one.key for one in worst if self._harm(one) > 1.0}
        name = self.limits.evaluator
        return {
            key: Score(name, one.loss, one.alone, one.left_out, key in refused)
            for key, one in self._given.items()
        }

    @property
    def _most(self) -> int:
        """How many deltas may be refused, so that the aggregation rule has enough clients."""
        clients = len({key.client for key in self.only or ()})
        return max(0, min(len(self._asked) // 2, clients - self.least_clients))

    def _harm(self, score: msg.Score) -> float:
        """How much a delta hurts, in units of what is allowed.

        One whose absence hurts the others does not, whatever it does alone: sites of one label are
        such.
        """
        loss, limits = abs(score.loss), self.limits
        left_out = score.left_out / max(limits.evaluator_left_out * loss, _LEAST_LOSS)
        alone = score.alone / max(limits.evaluator_alone * loss, _LEAST_LOSS)
        return left_out if score.left_out < 0.0 else max(alone, left_out)

"""Decides what the evaluator of a run does: a client that trains nothing. Pure.

It follows versions as other clients do (`client`), and is called in no round.

    joined     Evaluate                      none: the question before is dropped
    joined     DeltaMeta                     ReceiveDelta, or DeclineStream if it is not asked about
    any        ReceiveDelta is done, Rebased ScoreDeltas, once no stream is awaited, the model is on
                                             the version of the question, and nothing is scored
    any        StreamLost                    the others are scored without that one
    any        Scored                        Send a Score of each delta in a session; ScoreDeltas as
                                             above
"""

from __future__ import annotations

from typing import ClassVar

from fsl_async.roles.machine import (
    SERVER,
    DeclineStream,
    Effect,
    Offered,
    Received,
    Send,
    StreamLost,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import EVALUATE, ROLL_OUT, DeltaKey


class EvaluatorMachine(ClientMachine):
    """The state of a run at its evaluator."""

    duty: ClassVar[str] = EVALUATE

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self.shutdown.emptied = True  # it has nothing to send at its end
        self._version = -1
        self._shares: dict[DeltaKey, float] = {}
        """Deltas to score, until they are given to the training thread."""
        self._awaited: set[DeltaKey] = set()
        self._scoring = False
        """Whether the training thread has deltas to score: of one question, which bounds memory."""
        self.handlers = {
            **self.handlers,
            **dict.fromkeys((msg.Publish, msg.Call, msg.Turn, msg.Pace), lambda *_: []),
            msg.Evaluate: self._evaluate,
            msg.DeltaMeta: self._delta_offered,
            do.ReceiveDelta: lambda event, _: self._settle(event.of.delta.key),
            StreamLost: self._delta_lost,
            ev.Rebased: lambda event, now: [*self._rebased(event, now), *self._score()],
            ev.Scored: self._scored,
        }

    def _evaluate(self, event: Received[msg.Evaluate], now: float) -> list[Effect]:
        question = event.message
        self._version, self._shares = question.version, question.shares
        self._awaited = set(self._shares)
        return []

    def _delta_offered(self, event: Offered[msg.DeltaMeta], now: float) -> list[Effect]:
        delta = event.message.delta
        is_named = event.stream == msg.delta_stream(delta.key.text)
        if delta.key in self._awaited and is_named and not self.shutdown.asked:
            return [do.ReceiveDelta(SERVER, event.stream, delta)]
        return [DeclineStream(SERVER, event.stream, "not asked about")]

    def _delta_lost(self, event: StreamLost, now: float) -> list[Effect]:
        if not event.stream.startswith("delta:"):
            return self._stream_lost(event, now)
        # Not parsed: of a stream that it declines, the parameter server may choose any name.
        lost = [one for one in self._awaited if event.stream == msg.delta_stream(one.text)]
        return [effect for key in lost for effect in self._settle(key, is_lost=True)]

    def _settle(self, key: DeltaKey, *, is_lost: bool = False) -> list[Effect]:
        """Wait for a stream no longer. is_lost: its delta is not scored."""
        if key not in self._awaited:
            return []
        self._awaited.discard(key)
        if is_lost:
            del self._shares[key]
        return self._score()

    def _score(self) -> list[Effect]:
        is_ready = self._shares and not self._awaited and self.model_version == self._version
        if not is_ready or self._scoring or self.busy is not None:
            return []
        self._scoring = True
        shares, self._shares = self._shares, {}
        return [do.ScoreDeltas(self._version, shares)]

    def _scored(self, event: ev.Scored, now: float) -> list[Effect]:
        self._scoring = False
        sent = [
            Send(SERVER, msg.Score(event.version, key, *numbers))
            for key, numbers in event.found.items()
        ]
        return [*(sent if self.connected else []), *self._score()]


class RolloutMachine(EvaluatorMachine):
    """The state of a run at a client that draws and rates answers: it is asked nothing."""

    duty: ClassVar[str] = ROLL_OUT

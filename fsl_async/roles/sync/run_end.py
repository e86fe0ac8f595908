"""Takes the steps to the end of a run, and decides which clients each one waits for. Pure.

A run ends in three steps. An open round is completed. When the clients hold its version, one last
round is called: clients send their deltas and are held. When they hold the version of that round,
they are told to stop. Where clients train in rounds, the open round is the last one. Each
step waits `drain_s`, and then goes on waiting for clients whose transfers advance
(`roles.sync.shutdown`).

In groups a step comes before the last one: what this group merged goes into one more global round,
and all groups end with the same weights. It waits `last_global_s` for that.
"""

from __future__ import annotations

import enum

from attrs import define, field

from fsl_async.errors import ExitCode
from fsl_async.roles.groups.events import GroupEnds
from fsl_async.roles.machine import Deadlines, Effect, Finish, Note, Send
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps_state import Phase
from fsl_async.roles.sync.rounds import RoundCoordinator
from fsl_async.roles.sync.shutdown import RunShutdown, longer


class _Global(enum.Enum):
    """The last global round."""

    AHEAD = "ahead"
    ASKED = "asked"
    DONE = "done"


@define(eq=False)
class RunEnd:
    """The steps to the end. It shares the coordinator's state.

    "drain", "linger" and "global" are its own deadlines.
    """

    state: RunShutdown
    _rounds: RoundCoordinator
    _deadlines: Deadlines
    _last_global_s: float = 0.0
    _held: dict[str, int] = field(factory=dict, init=False)
    """Client -> the version that it held at the last look."""
    _global: _Global = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._global = _Global.AHEAD if self._last_global_s else _Global.DONE

    @property
    def asked(self) -> bool:
        """Whether the run is to end."""
        return self.state.asked

    def drain(self, reason: str, now: float) -> list[Effect]:
        """Begin the end now, in any phase."""
        if self.asked:
            return []
        rounds = self._rounds
        self.begin(reason, now)
        self._deadlines.cancel("limit")
        if rounds.phase is Phase.EMPTY:
            return self.finish()
        calls_last = not rounds.trigger.trains
        what = "one last round" if calls_last else "no further round"
        effects: list[Effect] = [Note(f"ending: {reason}; {what}")]
        if rounds.phase is Phase.READY:
            effects.extend(rounds.call(now) if calls_last else self.settle(now))
        elif rounds.awaits_nothing:
            effects.extend(rounds.call(now))
        elif rounds.phase is Phase.COLLECTING and rounds.round is not None:
            rounds.round.cap_s = now - rounds.round.called_at + self.state.drain_s
            effects.extend(rounds.evaluate(now))
        elif self._deadlines.when("retry") is not None:
            # One more try, at once; after MERGING the end follows by itself.
            self._deadlines.cancel("retry")
            effects.extend(rounds.merge(now))
        return effects

    def begin(self, reason: str, now: float) -> None:
        """Begin the end after the current round."""
        self.state.begin(reason, now)
        self._catching_up()
        rounds = self._rounds
        if not rounds.trigger.trains:  # clients train between rounds: one last round follows
            return
        if rounds.round is None:
            self.state.last_round_over = True
        else:  # the open one is the last, for clients that were called already
            rounds.round.last = True
            rounds.round.waiting.clear()

    def settle(self, now: float) -> list[Effect]:
        """Wait for every client to hold the version; then call the last round, or end after it."""
        if not self.asked:
            return []
        self._deadlines.cancel("sync")
        self._deadlines.set("drain", now + self.state.drain_s)
        to_all = self._rounds.trigger.selection.announces_to_all
        announced = [] if to_all else self._rounds.serving.announce(now)
        return [*announced, *self.end_if_all_hold(now)]

    def end_if_all_hold(self, now: float) -> list[Effect]:
        """Take the next step when no client is behind."""
        lingering = self._deadlines.when("linger") is not None
        if not self.asked or self._rounds.phase is not Phase.READY or lingering:
            return []
        return [] if self._rounds.serving.behind() else self._next_step(now)

    def _next_step(self, now: float) -> list[Effect]:
        self._deadlines.cancel("drain")
        rounds = self._rounds
        if self.state.last_round_over and rounds.deltas.pending and not rounds.too_few():
            return rounds.merge(now)  # deltas acknowledged during the last merge
        if not self.state.last_round_over:
            return rounds.call(now)
        if self._global is _Global.AHEAD:
            self._global = _Global.ASKED
            self._deadlines.set("global", now + self._last_global_s)
            text = (
                "ending: one last global round; waiting for the other groups to end, at most"
                f" {self._last_global_s:g} s"
            )
            return [Note(text), GroupEnds()]
        return self.finish() if self._global is _Global.DONE else []

    def global_done(self, now: float, problem: str = "") -> list[Effect]:
        """Go on after the last global round, or without it."""
        if self._global is not _Global.ASKED:
            return []
        self._global = _Global.DONE
        self._deadlines.cancel("global")
        effects = [Note(problem, "warning")] if problem else []
        # A version that is being made ends in this step, too.
        return [*effects, *(self.settle(now) if self._rounds.phase is Phase.READY else [])]

    def transfers_checked(self, event: ev.TransfersChecked, now: float) -> list[Effect]:
        """Extend a step for clients whose transfers advance, or take the next step."""
        if not self.asked:
            return []
        rounds = self._rounds
        until = longer(self.state.began_at, now)
        moving = {*event.advanced, *self._catching_up()} if until is not None else set()
        if rounds.phase is Phase.COLLECTING and rounds.round is not None:
            slow = [name for name in rounds.round.missing() if name not in moving]
            rounds.round.dismiss(slow)
            if until is not None and rounds.round.missing():
                rounds.round.cap_s = until - rounds.round.called_at
            return rounds.evaluate(now)
        if rounds.phase is not Phase.READY:
            return []
        if until is not None and rounds.serving.behind() & moving:
            self._deadlines.set("drain", until)
            return []
        return self._next_step(now)

    def _catching_up(self) -> set[str]:
        """The clients that moved to another version since the last look: small ones come fast."""
        before = self._held
        self._held = {name: member.version for name, member in self._rounds.members.items()}
        return {name for name, held in self._held.items() if before.get(name, held) != held}

    def without(self, problem: str) -> list[Effect]:
        """End without the last version, which could not be written."""
        self.state.reason = f"{self.state.reason}; {problem}, the next start merges it"
        return [Note(self.state.reason, "warning"), *self.finish(ExitCode.BUG)]

    def finish(self, exit_code: int = 0) -> list[Effect]:
        """Stop the clients, and end."""
        self._rounds.phase = Phase.DONE
        self._deadlines.clear()
        reason = self.state.reason or "done"
        stop = msg.Stop(reason)
        return [*(Send(name, stop) for name in self._rounds.members), Finish(reason, exit_code)]

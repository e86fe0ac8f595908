"""The ways to run rounds, by their names in `sync.trigger`. Pure. Times in seconds.

    trigger     a round opens (schedule)  it calls (selection)            complete (completion)
    clock       every `every_s`           all at once                     quorum and grace window
    rounds      as soon as there is a     all at once                     all have answered
                version
    turns       the same                  all, one by one in shard order  the last one has answered
    sequential  the same                  one, the next by shard          it has answered
    buffer      as soon as there is a     none: clients send by           K deltas are pending, or
                version                   themselves                      one is and a time is over

With `buffer` only the last round of a run calls clients, all at once, and waits for them. With
`clock`, a client is called to send its progress (`messages.Call`): pretraining. With the others it
is called to train a round, from the version that the round starts from to the round's end, where it
waits for the resulting version: split learning.

To add one, add the new part here, and an entry in TRIGGERS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field, frozen

from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import share_of
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.roles.sync.ps_state import ArrivalHistory, Member, Round

if TYPE_CHECKING:
    from fsl_async.config.settings import Config, SyncConfig

PAUSE_S = 1.0
"""Pause after a round without a version, so that idle clients are not called in a loop."""
PATIENCE = 2.0
"""Caps after which a round without a quorum merges what it has."""

# --- when a round opens ---------------------------------------------------------------------------


@frozen
class BackToBack:
    """A round opens `least_s` after the last version, in which the version's files are written.

    cap_s: how long a round waits for an answer. again_s: how long a round that is open beyond its
    cap waits before it is evaluated again. pause_s: after a round without a version. drain_s: for
    clients to reconnect after a restart.
    """

    cap_s: float
    again_s: float
    drain_s: float
    least_s: float = 0.0
    pause_s: float = PAUSE_S

    def after_version(self, called_at: float | None, now: float) -> float:
        """When to open a round after a version. called_at: of the last round; None at version 0."""
        return now + self.least_s

    def after_close(self, called_at: float, now: float) -> float:
        """When to open a round after one that made no version."""
        return now + self.pause_s

    def after_start(self, since_version_s: float, now: float) -> float:
        """When to open a round in a parameter server that continues a run."""
        return now + self.drain_s

    def when_short(self, now: float) -> float | None:
        """When to try again while too few clients are here; None: as soon as another one is."""
        return None


@frozen
class Periodic(BackToBack):
    """A round opens every `again_s`."""

    def after_version(self, called_at: float | None, now: float) -> float:
        """A period after the last call, and at least a tenth of one for clients to rebase."""
        if called_at is None:
            return now + self.again_s
        return max(called_at + self.again_s, now + 0.1 * self.again_s)

    def after_close(self, called_at: float, now: float) -> float:
        """A period after the last call."""
        return max(called_at + self.again_s, now)

    def after_start(self, since_version_s: float, now: float) -> float:
        """A period after the last version, as without the restart.

        So a parameter server that is often killed still makes versions. The clients get `drain_s`
        to reconnect, and a wrong wall clock costs at most a period.
        """
        left_s = max(self.again_s - since_version_s, self.drain_s)
        return now + min(left_s, self.again_s)

    def when_short(self, now: float) -> float | None:
        """A period later."""
        return now + self.again_s


# --- which clients it calls -----------------------------------------------------------------------


@frozen
class Opening:
    """The clients of a round: `called` at once (name -> incarnation), `waiting` for their turn in
    this order, and those of the called that have `answered` already.
    """

    called: dict[str, int] = field(factory=dict)
    waiting: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()


class Everyone:
    """All clients at once.

    announces_to_all: a new version is announced to all clients at once, and a client far behind
    gets update after update.
    """

    announces_to_all: ClassVar[bool] = True

    def choose(self, here: Mapping[str, Member], deltas: Deltas) -> Opening:
        """Return the clients of the next round, of those that are here and hold a version."""
        return Opening({name: member.incarnation for name, member in here.items()})

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """Why a delta does not fit this selection, as a code and a sentence."""
        return None

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """Restore the state of a run that continues. settled: the outcomes of its deltas."""


class Undone(Everyone):
    """All clients at once.

    A client whose delta of the round is durable already, because the parameter server was restarted
    before the merge, counts as answered: it is not called to train that round again.
    """

    def choose(self, here: Mapping[str, Member], deltas: Deltas) -> Opening:
        """All that are here."""
        called = {name: member.incarnation for name, member in here.items()}
        return Opening(called, answered=done_before(here, deltas))


class InTurns(Everyone):
    """All clients, one after another in shard order; durable deltas count as for `Undone`."""

    def choose(self, here: Mapping[str, Member], deltas: Deltas) -> Opening:
        """All that are here, the first one now."""
        answered = done_before(here, deltas)
        order = [name for name in in_order(here) if name not in answered]
        now = (*answered, *order[:1])
        called = {name: here[name].incarnation for name in now}
        return Opening(called, tuple(order[1:]), answered)


@define
class OneByOne(Everyone):
    """One client per version, in shard order: it starts from the weights of the one before.

    A version is announced to that client only, and sent in full: the others do not need it, and it
    lacks the versions in between. `_last`, the client whose delta made the newest version, is
    restored after a restart.
    """

    announces_to_all: ClassVar[bool] = False

    _last: str = ""
    _last_shard: int = -1

    def choose(self, here: Mapping[str, Member], deltas: Deltas) -> Opening:
        """The next in shard order; none when a delta of the newest version is pending."""
        if done_before(here, deltas) or deltas.pending:
            return Opening()
        order = in_order(here)
        if self._last in here:
            self._last_shard = here[self._last].shard
        later = [name for name in order if here[name].shard > self._last_shard]
        self._last = (later or order)[0]
        self._last_shard = here[self._last].shard
        return Opening({self._last: here[self._last].incarnation})

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """Object to a delta of a turn that is over: another client trains those weights now."""
        name = offer.key.client
        if open_ is not None and open_.awaits(name, offer.key.incarnation):
            return None
        return "turn", f"it is not, or no longer, the turn of {name}"

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """Find the client of the newest version: its delta has the highest base."""
        merged = [key for key, outcome in settled.items() if outcome == "merged"]
        if merged:
            self._last = max(merged, key=lambda key: key.base).client


def in_order(here: Mapping[str, Member]) -> list[str]:
    """The names in shard order."""
    return sorted(here, key=lambda name: (here[name].shard, name))


def done_before(here: Mapping[str, Member], deltas: Deltas) -> tuple[str, ...]:
    """Clients whose delta of the newest version is pending, of any incarnation."""
    durable = {key.client for key in deltas.pending if key.base == deltas.version}
    return tuple(name for name in in_order(here) if name in durable)


# --- when it is complete --------------------------------------------------------------------------


@frozen
class Verdict:
    """The action to take with a round now, and why. until: when a "wait" ends, if that is known.

    merge   make a version of the pending deltas
    close   end the round without a version
    wait    wait for answers
    next    call the next client of those that wait for their turn
    pass    stop waiting for the missing clients
    """

    action: Literal["merge", "close", "wait", "next", "pass"]
    reason: str
    until: float | None = None


@frozen
class QuorumAndGrace:
    """A quorum of the expected clients, then a grace window for the others.

    - All expected clients have answered: merge at once.
    - A quorum has answered: wait for the others during a grace window, computed from the times of
      answers in past rounds (median + k times the median absolute deviation, after hivemind#676:
      fixed timeouts have to be guessed), and never beyond the round's cap.
    - No quorum at the cap: the round stays open for `PATIENCE` caps, then it merges the pending
      deltas. Connected clients that hang must not stop the others.
    """

    sync: SyncConfig

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide by quorum, then by grace window.

        pending: acknowledged deltas that can make a version, late ones included.
        """
        contributors = open_.contributors()
        sent = f"{share_of(contributors, open_.called)} sent a delta"
        # Evaluated after every answer, perhaps a thousand times: count first, and name the missing
        # only where the reason needs it.
        if len(open_.answered) >= len(open_.expected) and not open_.missing():
            if pending:
                return Verdict("merge", f"{sent}, all have answered")
            return Verdict("close", "no client had a delta to send")
        needed = max(1, math.ceil(self.sync.quorum * len(open_.expected)))
        if contributors >= needed and pending:
            if open_.quorum_at is None:
                open_.quorum_at = now
            until = history.grace_until(self.sync, open_.called_at, open_.quorum_at)
            until = min(until, max(open_.called_at + open_.cap_s, open_.quorum_at))
            if now >= until:
                return Verdict(
                    "merge",
                    f"{sent} and the grace window of {until - open_.called_at:.1f} s"
                    f" is over; without {open_.named_missing()}",
                )
            return Verdict("wait", f"quorum of {needed} reached", until)
        waited_s = now - open_.called_at
        if pending and waited_s >= PATIENCE * open_.cap_s:
            return Verdict(
                "merge",
                f"no quorum after {waited_s:.1f} s ({sent}, {needed} needed);"
                f" merged without {open_.named_missing()}",
            )
        reason = f"{sent}, {needed} needed"
        if now >= open_.called_at + open_.cap_s:
            reason += f"; waiting for {open_.named_missing()}"
        return Verdict("wait", reason)


@frozen
class Buffered:
    """`size` deltas are pending, of any clients, or one is pending and `every_s` is over.

    After FedBuff (Nguyen et al., arXiv:2106.06639). The last round of a run calls all clients, and
    waits for them up to its cap.
    """

    size: int
    every_s: float

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide by the number of pending deltas, then by time."""
        buffered = f"{pending} of {self.size} deltas are buffered"
        if open_.last:
            sent = f"{share_of(open_.contributors(), open_.called)} sent a last delta"
            if open_.missing() and not (pending and now >= open_.called_at + open_.cap_s):
                return Verdict("wait", sent)
            return Verdict("merge" if pending else "close", sent)
        if pending >= self.size:
            return Verdict("merge", buffered)
        due_at = open_.called_at + self.every_s
        if pending and now >= due_at:
            return Verdict("merge", f"{buffered} after {now - open_.called_at:.1f} s")
        return Verdict("wait", buffered, due_at if now < due_at else now + self.every_s)


@frozen
class AllAnswered:
    """All called clients that are still here have answered, each within the cap.

    passes: at the cap, the turn of the missing client is over. Else pending deltas are merged
    without the missing clients; a round without any delta waits for all.
    """

    passes: bool

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide by missing answers, then by the cap."""
        missing = open_.missing()
        sent = f"{share_of(open_.contributors(), open_.called)} sent a delta"
        if not missing:
            if open_.waiting:
                return Verdict("next", sent)
            return Verdict("merge" if pending else "close", sent)
        if now < open_.called_at + open_.cap_s:
            return Verdict("wait", sent)
        late = f"{sent}, none from {open_.named_missing()} in time"
        if self.passes:
            return Verdict("pass", late)
        return Verdict("merge" if pending else "wait", late)


# --- together -------------------------------------------------------------------------------------


@frozen
class Trigger:
    """One way to run rounds. Each run has its own: a selection may have state.

    trains: a call asks to train this round, and to wait for the resulting version. Else it asks for
    the progress since the last one; the end of the run then calls one more round.
    clients_lead: clients send by themselves (`roles.sync.pacing`), a delta for any round counts,
    and only the last round of a run calls them.
    """

    schedule: BackToBack
    selection: Everyone
    completion: QuorumAndGrace | Buffered | AllAnswered
    trains: bool
    clients_lead: bool = False

    def opening(self, here: Mapping[str, Member], deltas: Deltas, *, last: bool) -> Opening:
        """The clients of the next round. last: after it nothing is merged."""
        if self.clients_lead and not last:
            return Opening()
        return self.selection.choose(here, deltas)

    def call(self, number: int, *, last: bool) -> Message:
        """The message to a client that is called."""
        return msg.Turn(number, last) if self.trains else msg.Call(number, last)


def _clock(config: Config) -> Trigger:
    every_s = config.sync.every_s
    # A little less than a period, so that a round is over before the next one.
    schedule = Periodic(0.95 * every_s, every_s, config.session.drain_s)
    return Trigger(schedule, Everyone(), QuorumAndGrace(config.sync), trains=False)


def _back_to_back(selection: type[Everyone], *, passes: bool) -> Callable[[Config], Trigger]:
    def trigger(config: Config) -> Trigger:
        cap_s = config.sync.round_cap_s
        schedule = BackToBack(cap_s, cap_s, config.session.drain_s)
        return Trigger(schedule, selection(), AllAnswered(passes), trains=True)

    return trigger


def _buffer(config: Config) -> Trigger:
    sync, every_s = config.sync, config.sync.every_s
    gap_s, drain_s = sync.version_gap_s, config.session.drain_s
    pause_s = max(gap_s, PAUSE_S, 0.1 * every_s)
    schedule = BackToBack(0.95 * every_s, every_s, drain_s, gap_s, pause_s)
    completion = Buffered(sync.buffer_size, every_s)
    return Trigger(schedule, Everyone(), completion, trains=False, clients_lead=True)


TRIGGERS: dict[str, Callable[[Config], Trigger]] = {
    "clock": _clock,
    "rounds": _back_to_back(Undone, passes=False),
    "turns": _back_to_back(InTurns, passes=True),
    "sequential": _back_to_back(OneByOne, passes=True),
    "buffer": _buffer,
}


def trigger_of(config: Config) -> Trigger:
    """A new trigger; raises KeyError for "auto" (`config.recipes.with_implied` replaces it)."""
    return TRIGGERS[config.sync.trigger](config)

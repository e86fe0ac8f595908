"""A client's decisions. Pure: no socket, no clock, no chance, no tensor.

Rules
- Training never waits for the network. While the server is away the client trains on, and offers what it has when it is back.
- One delta is outstanding at a time. It is kept, coded, until the server has acknowledged or refused its key, and offered again
  after every reconnect. A call that comes meanwhile is answered afterwards.
- A delta is measured from the base its key names and never recomputed against another: before the base is replaced, what is
  outstanding is coded to its end.
- The training thread does one thing for the machine at a time: copy a snapshot, or move onto a new base. `busy` says which.
- A new version is fetched as soon as it is announced, from what is held; what was trained since the last snapshot is carried over
  (theta <- Theta_new + (theta_now - u)). After a quarantined delta it is discarded instead: those weights are not finite.
- A digest that differs from the announced one, or frames that cannot be applied, are answered by fetching the version in full,
  after a pause: a fault that stays must not move whole models in a tight loop.
- A call dies with the session it came in; the server repeats it to a client that it still waits for.
- After the last call nothing more is merged, so the training thread is held at its snapshot until the run's last version is here:
  nothing is trained in vain, and the user's loop ends with the run's weights. It goes on when there was nothing to send, when the
  delta is refused, and when the session is lost: who knows when the server is back.
- When training ends before the run does, what was trained since the last snapshot is sent as a last delta, after the one
  that is outstanding. That is waited for while its bytes advance, `drain_cap_s` at the most, and `drain_s` without a session.

    state      event                         -> effects
    offline    Welcomed                         SendManifest, OfferDelta when one is outstanding
    joined     PublishAsked                     OfferInitial
    joined     VersionAnnounced (not held)      Tell Fetch; AdoptInitial when it is the version published here
    joined     FetchOffered                     ReceiveVersion
    any        FetchReceived                    FinishEncoding when a delta is not fully coded, then ReplaceBase
    any        BaseReplaced                     Rebase
    any        Rebased                          Tell Holding
    training   SyncCalled                       TakeSnapshot when nothing is outstanding (the last call: and hold)
    training   Snapshotted                      OfferDelta, or Tell Skip when no token was trained
    any        DeltaAcknowledged, DeltaRefused  DropDelta, then whatever waited
    held       ServerLost, DeltaRefused         ResumeTraining
    any        RunEnded, DrainAsked             EndTraining
    any        TrainingEnded                    TakeSnapshot, then Finish once all is settled; Finish at once after RunEnded
    ending     timer "end"                      LookAtTransfers, then Finish unless something advances
    finished   anything                         nothing

What a person should know is said in a Note: joining, the first weights, every version that the model is moved onto (with the fact
`version`, to which the node adds how training goes), and that the server went away and came back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import field, frozen, mutable

from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async import messages as msg
from fsl_async.deadlines import Deadlines
from fsl_async.effects import Effect
from fsl_async.events import DeltaKey

SERVER = ""  # a client has one peer
_LOST = {
    "expired": "the server does not answer",
    "reset": "the server restarted",
    "bye": "the server said goodbye",
    "protocol": "the server sent what no server sends",
}

MOMENT_S = 0.1
"""Too short a wait to be worth one."""

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


@frozen
class ClientRules:
    """Times in seconds."""

    reoffer_s: float = 5.0
    drain_s: float = 10.0
    """At the end: for the training thread, for a session, and for a transfer to begin."""
    stalled_s: float = 60.0
    """At the end: for a transfer to advance. Its receiver tells what it wrote in steps of up to 2 MiB."""
    drain_cap_s: float = 3600.0
    """At the end: for everything together."""


@mutable
class Outstanding:
    """The delta that waits for its acknowledgement."""

    key: DeltaKey
    base_digest: str
    tokens: int
    steps: int
    round: int
    metrics: dict[str, float] = field(factory=dict)
    coded: bool = False


@frozen
class Held:
    """A version and the digest of its weights."""

    version: int = -1
    digest: str = ""


class ClientMachine:
    """The state of a run at a client. `handle` and `next_deadline` are the whole interface."""

    def __init__(self, rules: ClientRules, name: str, incarnation: int) -> None:
        self.rules = rules
        self.name = name
        self.incarnation = incarnation
        self.run = ""
        self.connected = False
        self.away = False  # the server was lost and is not back
        self.attached = False
        self.publishing = False
        self.adopted = False  # version 0 is this client's own weights
        self.latest = Held()
        self.base = Held()
        self.model_version = -1
        self.model_digest = ""  # of the version the weights were last moved onto, which the next delta is measured from
        self.delta: Outstanding | None = None
        self.sequence = 0
        self.call: ev.SyncCalled | None = None
        self.answering: ev.SyncCalled | None = None
        self.held = False  # the training thread waits in its step for the run's last version
        self.fetching: int | None = None  # a version that was asked for or is on its way
        self.fetched: int | None = None  # a version that is here and not applied yet
        self.busy: str | None = None  # "snapshot" | "coding" | "replacing" | "rebasing"
        self.discard = False
        self.ending: tuple[str, int] | None = None
        self.training = True
        self.ended_at = 0.0  # when training did
        self.emptied = False  # the last snapshot is taken
        self.refusing = False  # the server takes nothing from this client any more
        self.finished = False
        self.tokens_acknowledged = 0
        self.deadlines = Deadlines()
        self._handlers: dict[type[ev.Event], Callable[[Any, float], list[Effect]]] = {
            ev.TimerFired: self._timers,
            ev.Attached: self._attached,
            ev.Welcomed: self._welcomed,
            ev.ServerLost: self._lost,
            ev.ServerRefused: self._refused,
            ev.PublishAsked: self._publish,
            ev.SyncCalled: self._called,
            ev.DeltaAcknowledged: self._acknowledged,
            ev.DeltaRefused: self._delta_refused,
            ev.VersionAnnounced: self._announced,
            ev.FetchOffered: self._fetch_offered,
            ev.FetchReceived: self._fetch_received,
            ev.FetchFailed: self._fetch_failed,
            ev.BaseReplaced: self._base_replaced,
            ev.Rebased: self._rebased,
            ev.Snapshotted: self._snapshotted,
            ev.EncodingFinished: self._encoding_finished,
            ev.StreamLost: self._stream_lost,
            ev.RunEnded: self._run_ended,
            ev.DrainAsked: self._drain_asked,
            ev.TrainingEnded: self._training_ended,
            ev.TransfersSeen: self._transfers_seen,
        }

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        return self.deadlines.next()

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event and return what is to be done, in order."""
        if self.finished:
            return []
        handler = self._handlers.get(type(event))
        return handler(event, now) if handler is not None else []

    # --- the session ---

    def _attached(self, event: ev.Attached, now: float) -> list[Effect]:
        self.attached = True
        return [do.SendManifest()] if self.connected else []

    def _welcomed(self, event: ev.Welcomed, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self.run:
            text = (
                f"joined run {event.run} as {self.name}, part {event.shard + 1} of {event.shards}"
            )
            effects.append(do.Note(text))
        elif self.away:
            effects.append(do.Note("the server is back"))
        self.connected, self.away = True, False
        self.run = event.run
        if event.incarnation is not None:
            self.incarnation = event.incarnation  # the handshake may have raised it
        self._forget_session()
        if self.attached:
            effects.append(do.SendManifest())
        return effects + self._offer()

    def _lost(self, event: ev.ServerLost, now: float) -> list[Effect]:
        self.connected = False
        self._forget_session()
        self.away = True
        what = _LOST.get(event.reason, f"the server is away ({event.reason})")
        if not self.training:
            if event.reason == "bye":
                return self._finish()
            self.deadlines.set("end", now + self.rules.drain_s)
            meanwhile = f"waiting {self.rules.drain_s:g} s for it, to send what was trained"
        else:
            meanwhile = "training goes on" if self.model_version >= 0 else "trying again"
        note = do.Note(f"{what}; {meanwhile}", "warning")
        return [note, *([] if self.busy == "snapshot" else self._resume())]

    def _forget_session(self) -> None:
        """Nothing that was asked in a session is answered in the next one."""
        self.publishing = False
        self.fetching = None
        self.call = None
        if self.answering is not None:
            self.answering = ev.SyncCalled(self.answering.round)
        self.deadlines.cancel("offer")
        self.deadlines.cancel("fetch")

    def _refused(self, event: ev.ServerRefused, now: float) -> list[Effect]:
        self.refusing = True
        return self._end(event.text, 0 if event.code == "finished" else EXIT_REFUSED, now)

    def _offer(self) -> list[Effect]:
        delta = self.delta
        if delta is None or not self.connected:
            return []
        d = delta
        return [do.OfferDelta(d.key, d.base_digest, d.tokens, d.steps, d.round, d.metrics)]

    def _timers(self, event: ev.TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            if name == "offer":
                effects.extend(self._offer())
            elif name == "fetch":
                self.fetching = None
                effects.extend(self._advance())
            elif self.training or not self.connected:  # end
                effects.extend(self._finish())
            else:
                effects.append(do.LookAtTransfers())
        return effects

    def _stream_lost(self, event: ev.StreamLost, now: float) -> list[Effect]:
        if event.stream.startswith("delta:"):
            if self.delta is not None and self.connected:
                self.deadlines.set("offer", now + self.rules.reoffer_s)
            return []
        if event.stream.startswith("initial:"):
            self.publishing = False
            return []
        self._fetch_later(now)  # the stream is bad, not the session
        return []

    def _fetch_later(self, now: float) -> None:
        """Ask again if something is missing then, but not in a tight loop."""
        self.fetching = self.latest.version
        self.deadlines.set("fetch", now + self.rules.reoffer_s)

    # --- versions, down ---

    def _publish(self, event: ev.PublishAsked, now: float) -> list[Effect]:
        if not self.attached or self.base.version >= 0 or self.ending is not None:
            return []
        self.publishing = True
        return [do.OfferInitial()]

    def _announced(self, event: ev.VersionAnnounced, now: float) -> list[Effect]:
        self.latest = Held(event.version, event.digest)
        if self.publishing:
            self.publishing = False
            if event.version == 0 and self.busy is None and self.base.version < 0:
                self.busy, self.adopted = "replacing", True
                return [do.Note("published the initial weights"), do.AdoptInitial()]
        if self.base == self.latest and self.model_version == event.version:
            return [do.Tell(SERVER, msg.Holding(self.base.version, self.base.digest))]
        return self._advance()

    def _fetch_offered(self, event: ev.FetchOffered, now: float) -> list[Effect]:
        follows = event.kind == "full" or event.version == self.base.version + 1
        if (
            not follows
            or not self.attached
            or self.base == self.latest
            or self.fetched is not None
            or self.busy == "replacing"
            or self.ending is not None
        ):
            if self.fetching is not None:  # perhaps this was the answer: do not wait for another
                self._fetch_later(now)
            return [do.DeclineStream(SERVER, event.stream, "not wanted")]
        self.fetching = event.version
        self.deadlines.cancel("fetch")
        return [do.ReceiveVersion(event.stream, event.kind, event.version)]

    def _fetch_received(self, event: ev.FetchReceived, now: float) -> list[Effect]:
        self.fetching = None
        self.deadlines.cancel("fetch")
        self.fetched = event.version
        return self._advance()

    def _fetch_failed(self, event: ev.FetchFailed, now: float) -> list[Effect]:
        text = f"version {event.version} could not be applied: {event.reason}; fetching it in full"
        return self._base_lost(text, now)

    def _base_lost(self, text: str, now: float) -> list[Effect]:
        self.busy = None
        self.base = Held()
        self._fetch_later(now)
        return [do.Note(text, "warning"), *self._advance()]

    def _base_replaced(self, event: ev.BaseReplaced, now: float) -> list[Effect]:
        self.base = Held(event.version, event.digest)
        if event.version == self.latest.version and event.digest != self.latest.digest:
            text = f"version {event.version} has digest {event.digest} here and {self.latest.digest} at the server: fetching it in full"
            return self._base_lost(text, now)
        return self._rebase()

    def _rebase(self) -> list[Effect]:
        self.busy = "rebasing"
        discard, self.discard = self.discard, False
        return [do.Rebase(self.base.version, discard)]

    def _rebased(self, event: ev.Rebased, now: float) -> list[Effect]:
        self.busy = None
        effects = self._say_version(event.version)
        self.model_version, self.model_digest = event.version, self.base.digest
        if event.dropped_tokens:
            text = f"weights were not finite: back on version {event.version}, without the last {event.dropped_tokens} tokens"
            effects.append(do.Note(text, "warning"))
        if self.connected:
            effects.append(do.Tell(SERVER, msg.Holding(self.base.version, self.base.digest)))
        return effects + self._advance()

    def _say_version(self, version: int) -> list[Effect]:
        if version == self.model_version:  # back onto it, after weights that were not finite
            return []
        if self.model_version >= 0:
            return [do.Note(f"version {version}", facts={"version": version})]
        # Version 0 is here without a transfer only where it was made, which was said then.
        return [] if self.adopted and version == 0 else [do.Note(f"received version {version}")]

    # --- deltas, up ---

    def _called(self, event: ev.SyncCalled, now: float) -> list[Effect]:
        if event == self.answering or (self.delta is not None and self.delta.round == event.round):
            return []
        self.call = event
        return self._advance()

    def _snapshotted(self, event: ev.Snapshotted, now: float) -> list[Effect]:
        self.busy = None
        answered, self.answering = self.answering, None
        assert answered is not None
        if event.tokens < 1 or event.steps < 1:
            effects: list[Effect] = [do.DropDelta(event.sequence)]
            if self.connected:
                reason = "no token trained since the last snapshot"
                effects.append(do.Tell(SERVER, msg.Skip(answered.round, reason)))
            return [*effects, *self._resume(), *self._advance()]
        key = DeltaKey(self.name, self.incarnation, event.base, event.sequence)
        self.delta = Outstanding(
            key, self.model_digest, event.tokens, event.steps, answered.round, event.metrics
        )
        waits = answered.last and self.connected and self.ending is None
        return [*([] if waits else self._resume()), *self._offer(), *self._advance()]

    def _resume(self) -> list[Effect]:
        """Let the training thread go, where a last call holds it."""
        held, self.held = self.held, False
        return [do.ResumeTraining()] if held else []

    def _encoding_finished(self, event: ev.EncodingFinished, now: float) -> list[Effect]:
        self.busy = None
        if self.delta is None or self.delta.key.sequence != event.sequence:
            return [do.DropDelta(event.sequence), *self._advance()]  # settled while it was coded
        self.delta.coded = True
        return self._advance()

    def _acknowledged(self, event: ev.DeltaAcknowledged, now: float) -> list[Effect]:
        if self.delta is None or self.delta.key != event.key:
            return []
        self.tokens_acknowledged += self.delta.tokens
        return self._settled(now)

    def _delta_refused(self, event: ev.DeltaRefused, now: float) -> list[Effect]:
        if self.delta is None or self.delta.key != event.key:
            return []
        if event.code == "later":
            self.deadlines.set("offer", now + self.rules.reoffer_s)
            return []
        text = f"the server refused a delta of {self.delta.tokens} tokens: {event.text}"
        if event.code == "quarantined":
            self.discard = True
            text += "; going back to the run's weights"
        return [do.Note(text, "warning"), *self._resume(), *self._settled(now)]

    def _settled(self, now: float) -> list[Effect]:
        assert self.delta is not None
        sequence = self.delta.key.sequence
        self.delta = None
        self.deadlines.cancel("offer")
        # A delta that the worker is coding at this moment is dropped when that is done.
        effects: list[Effect] = [] if self.busy == "coding" else [do.DropDelta(sequence)]
        return effects + self._advance()

    # --- what is next ---

    def _advance(self) -> list[Effect]:
        """Start whatever is possible now; called after every change."""
        if not self.training:
            return self._wind_down()
        if self.ending is not None or not self.attached:
            return []
        effects: list[Effect] = []
        if (
            self.connected
            and not self.publishing
            and self.latest.version >= 0
            and self.base != self.latest
            and self.fetching is None
            and self.fetched is None
            and self.busy != "replacing"
        ):
            self.fetching = self.latest.version
            effects.append(do.Tell(SERVER, msg.Fetch(self.base.version, self.base.digest)))
        if self.busy is not None:
            return effects
        if self.fetched is not None:
            if self.delta is not None and not self.delta.coded:
                self.busy = "coding"
                return [*effects, do.FinishEncoding(self.delta.key.sequence)]
            version, self.fetched = self.fetched, None
            self.busy = "replacing"
            return [*effects, do.ReplaceBase(version)]
        if self.discard and self.base.version >= 0:
            return effects + self._rebase()
        if self.call is not None and self.delta is None and self.model_version >= 0:
            self.answering, self.call = self.call, None
            effects.append(self._take_snapshot(hold=self.answering.last))
        return effects

    def _take_snapshot(self, *, hold: bool = False) -> Effect:
        self.sequence += 1
        self.busy, self.held = "snapshot", hold
        return do.TakeSnapshot(self.sequence, hold)

    # --- the end ---

    def _run_ended(self, event: ev.RunEnded, now: float) -> list[Effect]:
        self.refusing = True
        return [do.Leave(event.reason), *self._end(event.reason, 0, now)]

    def _drain_asked(self, event: ev.DrainAsked, now: float) -> list[Effect]:
        return self._end(event.reason, EXIT_INTERRUPTED, now)

    def _end(self, reason: str, exit_code: int, now: float) -> list[Effect]:
        if self.refusing and not self.training:
            return self._finish()  # no answer comes any more
        if self.ending is not None:
            return []
        self.ending = (reason, exit_code)
        self.deadlines.set("end", now + self.rules.drain_s)
        return [do.EndTraining(reason)]

    def _training_ended(self, event: ev.TrainingEnded, now: float) -> list[Effect]:
        self.training = False
        if event.error is not None:
            # A training function that raises because its node was refused says nothing new.
            if self.ending is None or self.ending[1] != EXIT_REFUSED:
                self.ending = (event.error, EXIT_FAILED)
            return self._finish()
        if self.ending is None:
            self.ending = ("the training function returned", 0)
        if self.refusing or self.model_version < 0:
            return self._finish()
        self.ended_at = now
        self.deadlines.set("end", now + self.rules.drain_s)
        return self._wind_down()

    def _wind_down(self) -> list[Effect]:
        """The training thread is back: what it trained should still arrive. Called after every change from then on."""
        if self.busy is not None or self.delta is not None:
            return []
        if not self.emptied:
            self.emptied = True
            # Where the server collects for this version's round, it counts as the answer.
            self.answering = ev.SyncCalled(self.latest.version)
            return [self._take_snapshot()]
        return self._finish()

    def _transfers_seen(self, event: ev.TransfersSeen, now: float) -> list[Effect]:
        until = min(now + self.rules.stalled_s, self.ended_at + self.rules.drain_cap_s)
        if not event.advanced or until <= now + MOMENT_S:
            return self._finish()
        self.deadlines.set("end", until)
        return []

    def _finish(self) -> list[Effect]:
        assert self.ending is not None
        self.finished = True
        self.deadlines.clear()
        reason, exit_code = self.ending
        return [do.Finish(reason, exit_code)]

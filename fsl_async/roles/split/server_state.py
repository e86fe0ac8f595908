"""State of the split server's machine: its clients, its checkpoints, and its end. Pure.

A client's uploads are trained in the order of their keys, so that its last trained key stands for
all before it. A received upload waits for those offered before it; uploads behind one that was not
received are dropped with the session, and the client offers them again.

A checkpoint is due every `CHECKPOINT_EVERY` changes, and when one is requested and anything has
changed. It is made between two trainings, so that progress and tensors are consistent. One is
written at a time; a failed one is tried again after `RETRY_S`.

There are two ways to end. The run is over, as a client or the parameter server reports: then it is
over for all. Or this process is asked to end while that is not known: then it leaves, and another
process goes on in its folder. A client that waits must be able to distinguish them, because uploads
of a run that is not over must not be given up.

The parameter server of another process keeps a session too, in which it sends one message: that the
run is over. While that session lasts the run goes on, although clients are away. Without it and
without a client, either all are down, or the run has ended and no peer could report it. These
cannot be distinguished, so the split server waits `alone_s` and then leaves: a process that is
started in its folder later goes on.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import Factory, define, field, mutable

from fsl_async.roles.client_facts import ClientFact, ClientFacts
from fsl_async.roles.machine import (
    ClientLeft,
    Deadlines,
    Effect,
    Event,
    Fact,
    Greeted,
    Note,
    Refuse,
)
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import ClientProgress, SplitProgress, SplitRecovered
from fsl_async.roles.split.messages import PS_ROLE, UploadKey, UploadRefused

REMEMBERED = 16
"""Declined keys of a client that get the same answer again; it has fewer under way."""
CHECKPOINT_EVERY = 100
RETRY_S = 30.0
ALONE = "alone"
"""Name of the deadline of a split server without any session."""


class SplitClients(ClientFacts):
    """States what the clients do, in facts. They train at once: there is nothing to fetch first."""

    def after(self, event: Event, effects: Sequence[Effect]) -> list[Fact]:
        """Return the facts that `event`, which the machine has handled, has changed."""
        found = self.left(event) if isinstance(event, ClientLeft) else []
        for effect in effects:
            if isinstance(effect, split.AdmitSplit):
                peer, incarnation = effect.peer, effect.incarnation
                found += self.begins(ClientFact(peer, incarnation, "training", begins=True))
            elif isinstance(effect, Refuse):
                found += self.refused(effect)
        return found


@mutable
class Upload:
    """An upload that is not trained yet."""

    offer: msg.SmashedMeta
    received: bool = False
    queued: bool = False


@define
class Peer:
    """One client. `uploads` are in the order of their keys, which is the order of their offers."""

    name: str
    progress: ClientProgress = Factory(ClientProgress)
    connected: bool = False
    run_over: bool = False  # reported in this session
    uploads: dict[UploadKey, Upload] = field(factory=dict)
    answers: dict[UploadKey, msg.GradientMeta] = field(factory=dict)  # kept, oldest first
    declined: deque[UploadRefused] = field(factory=lambda: deque(maxlen=REMEMBERED))
    open_step: UploadKey | None = None  # U-shape: the first leg whose second leg is awaited

    @property
    def incarnation(self) -> int:
        """The newest one that has had a session."""
        return self.progress.incarnation

    @property
    def last_trained(self) -> str:
        """Text of the last trained upload of this incarnation; empty where there is none."""
        last = self.progress.last
        return last.text if last is not None and last.incarnation == self.incarnation else ""

    def change(self, **members: Any) -> None:
        """Change members of its progress."""
        self.progress = attrs.evolve(self.progress, **members)

    def begin_session(self, event: Greeted[msg.SplitHello]) -> list[Effect]:
        """Admit it: take over its hello, and drop answers to another incarnation of it."""
        hello = event.message
        self.connected = True
        self.change(auxiliary_seen=max(self.progress.auxiliary_seen, hello.auxiliary))
        self.round_done(hello.done_round, hello.done_samples)
        if event.incarnation == self.incarnation:
            return []
        effects: list[Effect] = [split.DropAnswer(key) for key in self.answers]
        self.answers.clear()
        self.change(incarnation=event.incarnation)
        return effects

    def round_done(self, number: int, samples: int) -> None:
        """Take the report of a round, if it is its newest."""
        if number > self.progress.done_round:
            self.change(done_round=number, done_samples=samples)

    def is_connected(self, key: UploadKey) -> bool:
        """Whether the incarnation that made `key` has a session."""
        return self.connected and key.incarnation == self.incarnation

    def refusal(self, key: UploadKey, in_flight: int) -> UploadRefused | None:
        """Return the refusal of an offered upload, or None to accept the transfer.

        Its code: known | here | later | gone | order, or that of an earlier refusal.
        """
        for refused in self.declined:
            if refused.key == key:
                return refused
        last = self.progress.last
        if last is not None and key <= last:  # or of an incarnation whose successor's was trained
            return UploadRefused(key, "known", "trained before")
        upload = self.uploads.get(key)
        if upload is not None:
            return UploadRefused(key, "here", "it is here already") if upload.received else None
        if self.uploads and key < next(reversed(self.uploads)):
            return UploadRefused(key, "order", "a later upload was offered before it")
        if key.leg and self.open_step != key.first_leg:
            return UploadRefused(key, "gone", "its first leg is not open here")
        if sum(other.incarnation == key.incarnation for other in self.uploads) >= in_flight:
            return UploadRefused(key, "later", f"more than {in_flight} at a time")
        return None

    def ready(self) -> list[UploadKey]:
        """Mark and return those that have become trainable: received, as all before them are."""
        found = []
        for key, upload in self.uploads.items():
            if not upload.received:
                break
            if not upload.queued:
                upload.queued = True
                found.append(key)
        return found

    def lose_session(self) -> list[Effect]:
        """The session is over: forget uploads that are not trainable, and open steps."""
        effects: list[Effect] = [
            split.DropUpload(key) for key, upload in self.uploads.items() if not upload.queued
        ]
        if self.open_step is not None:
            effects.append(split.ForgetSteps(self.name))
        self.uploads = {key: upload for key, upload in self.uploads.items() if upload.queued}
        self.connected = self.run_over = False
        self.open_step = None
        return effects


def refusal_of(
    event: Greeted[msg.SplitHello], run: str, architecture: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return why a client does not belong to this run, as a code and a sentence with the remedy.

    None when it does.
    """
    peer, hello = event.peer, event.message
    if peer == PS_ROLE:
        text = (
            f"{PS_ROLE} is the parameter server's name here; start the client with another --name"
        )
        return "name", text
    if not hello.run:
        return "run", f"{peer} is in no run yet: it has to join the parameter server first"
    if run and hello.run != run:
        return "run", _another_run(run, peer, hello.run)
    for name in {**architecture, **hello.architecture}:
        here, there = architecture.get(name, "none"), hello.architecture.get(name, "none")
        if here != there:
            text = (
                f"{name} of {peer} is {there}, and {here} at the split server;"
                " use the same configuration at every node"
            )
            return "model", text
    return None


def _another_run(run: str, peer: str, theirs: str) -> str:
    return (
        f"this split server is in run {run}, but {peer} is in run {theirs}:"
        " give every run a split server, and a folder, of its own"
    )


def replicas_due(peers: Iterable[Peer], averaged: int, round_: int) -> split.AverageReplicas | None:
    """Return the average of the newest round before `round_` that is not averaged.

    It is over the replicas of the clients that are done with that round. None: there is none.
    """
    done = {
        peer.name: peer.progress
        for peer in peers
        if averaged < peer.progress.done_round < round_ and peer.progress.done_samples > 0
    }
    if not done:
        return None
    newest = max(one.done_round for one in done.values())
    samples = {name: one.done_samples for name, one in done.items() if one.done_round == newest}
    return split.AverageReplicas(newest, samples)


@mutable
class Checkpoints:
    """The split server's checkpoints. They share its deadlines; "retry" is theirs."""

    deadlines: Deadlines
    every: int = CHECKPOINT_EVERY  # uploads
    number: int = 0  # of the last one in this process
    since: int = 0  # changes since it was begun
    is_due: bool = False
    writing: dict[str, UploadKey] | None = None  # client -> last upload in the one being written

    def changed(self) -> None:
        """Count a training, an alignment or an average."""
        self.since += 1
        self.is_due = self.is_due or self.since >= self.every

    def request(self) -> None:
        """Request a checkpoint now, if anything has changed."""
        self.is_due = self.is_due or self.since > 0

    def due(self, progress: Callable[[], SplitProgress]) -> list[Effect]:
        """Return the checkpoint that is due, if it can be made now; call it between trainings."""
        waits = self.writing is not None or self.deadlines.when("retry") is not None
        if not self.is_due or waits:
            return []
        made = progress()
        self.is_due, self.since, self.number = False, 0, self.number + 1
        self.writing = {
            name: one.last for name, one in made.clients.items() if one.last is not None
        }
        return [split.Checkpoint(self.number, made)]

    def written(self) -> dict[str, UploadKey]:
        """Record that it is durable, or given up. Return each client's last upload in it."""
        found, self.writing = self.writing or {}, None
        return found

    def failed(self, now: float) -> None:
        """Record that it could not be written, and try again later."""
        self.writing, self.is_due = None, True
        self.deadlines.set("retry", now + RETRY_S)


def resumed(event: SplitRecovered) -> list[Effect]:
    """Return a note and ledger lines for a split server that goes on from its last checkpoint."""
    uploads, lost = event.progress.uploads, event.lost
    if not uploads and not lost:
        return []
    text = f"continuing after {counted(uploads, 'upload')}"
    if lost:
        text += (
            f"; {counted(len(lost), 'upload')} since the last checkpoint are lost unless clients"
            " still have them"
        )
    why = "trained after the last checkpoint of a split server that died"
    return [Note(text), *(split.RecordUpload(key, "dropped", why) for key in lost)]


@mutable
class SplitShutdown:
    """The end of a split server, and the parameter server's session. It shares the deadlines."""

    deadlines: Deadlines
    alone_s: float
    reason: str | None = None  # None until it is to end
    run_over: bool = False  # reported by a peer: no later round averages the last one
    done: bool = False
    ps_incarnation: int | None = None  # of the parameter server that has a session

    @property
    def asked(self) -> bool:
        """Whether the split server is to end."""
        return self.reason is not None

    @property
    def leaves(self) -> bool:
        """Whether the run goes on without this process."""
        return self.asked and not self.run_over

    def hello_refusal(self) -> tuple[str, str] | None:
        """Return why no client is admitted any more, as a code and a sentence, or None."""
        if self.leaves:
            text = "this split server is about to end; the run goes on with its next process"
            return "leaving", text
        return ("finished", "this run has ended") if self.asked else None

    def upload_refusal(self, key: UploadKey) -> UploadRefused | None:
        """Return why no upload is taken any more; None while uploads are."""
        if self.leaves:
            return UploadRefused(key, "later", "the split server is about to end")
        return UploadRefused(key, "ended", "the run has ended") if self.asked else None

    def update(self, run: str, now: float, *, clients: bool) -> None:
        """A peer has come or gone: set or cancel the deadline of a split server that is alone.

        A split server that is in no run yet waits for its first peer without limit.
        """
        if self.asked:
            return
        if not run or self.alone_s <= 0 or clients or self.ps_incarnation is not None:
            self.deadlines.cancel(ALONE)
        elif self.deadlines.when(ALONE) is None:
            self.deadlines.set(ALONE, now + self.alone_s)

    def admit_ps(self, event: Greeted[msg.PsHello], run: str) -> list[Effect]:
        """Welcome the parameter server of `run`, or of any run where that is empty."""
        theirs, refusal = event.message.run, self.hello_refusal()
        if refusal is None and event.peer != PS_ROLE:
            refusal = "name", f"a parameter server comes as {PS_ROLE}, and not as {event.peer}"
        if refusal is None and run and theirs != run:
            refusal = "run", _another_run(run, "the parameter server", theirs)
        if refusal is not None:
            return [Refuse(event.peer, *refusal)]
        self.ps_incarnation = event.incarnation
        welcome = msg.SplitWelcome(theirs, 0, "", -1)
        return [split.AdmitSplit(event.peer, event.incarnation, welcome)]

    def is_ps(self, peer: str) -> bool:
        """Whether a message comes from a parameter server that was admitted."""
        return peer == PS_ROLE and self.ps_incarnation is not None

    def alone_reason(self) -> str:
        """Return why a split server that is alone ends."""
        return (
            f"no client and no parameter server for {self.alone_s:g} s (split.alone_s): the run has"
            " ended, or all are away; what was trained is in the last checkpoint, and a start with"
            " the same --run-dir goes on"
        )

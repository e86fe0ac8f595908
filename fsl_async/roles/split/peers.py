"""What the split server knows of one client: its book, its session, and its uploads between offer and training. Pure.

A client's uploads are trained in the order of their keys, so that its last trained key stands for all before it. One that is here waits
for those offered before it; what is behind one that did not arrive goes with the session, and the client offers both again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import attrs
from attrs import Factory, define, field, frozen, mutable

from fsl_async.roles.machine import Effect
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split.events import ClientProgress, UploadKey
from fsl_async.roles.split.messages import PS_ROLE

REMEMBERED = 16
"""Declined keys of a client that are answered as they were; it has fewer under way."""


@mutable
class Upload:
    """An upload that is not trained yet."""

    offer: ev.UploadOffered
    here: bool = False
    queued: bool = False


@frozen
class Answer:
    """Why an upload is not taken, as the client is told: known | here | later | stale | gone | order | refused."""

    code: str
    text: str


@define
class Peer:
    """One client. `uploads` are in the order of their keys, which is that of their offers."""

    name: str
    book: ClientProgress = Factory(ClientProgress)
    connected: bool = False
    over: bool = False  # says that the run has ended
    uploads: dict[UploadKey, Upload] = field(factory=dict)
    answers: deque[UploadKey] = field(factory=deque)  # kept, oldest first
    declined: deque[tuple[UploadKey, Answer]] = field(factory=lambda: deque(maxlen=REMEMBERED))
    open_step: UploadKey | None = None  # U-shape: the first leg whose second one is to come

    @property
    def incarnation(self) -> int:
        """The newest life that has been here."""
        return self.book.incarnation

    @property
    def known(self) -> str:
        """Text of the last trained upload of the life that is here; empty where there is none."""
        last = self.book.last
        return last.text if last is not None and last.incarnation == self.incarnation else ""

    def begin_session(self, event: ev.SplitClientHello) -> list[Effect]:
        """It is admitted: take over what it says. What was given to another life of it is forgotten."""
        seen = max(self.book.auxiliary_seen, event.auxiliary)
        book = attrs.evolve(self.book, auxiliary_seen=seen)
        if event.done_round > book.done_round:
            book = attrs.evolve(book, done_round=event.done_round, done_samples=event.done_samples)
        effects: list[Effect] = []
        if event.incarnation != book.incarnation:
            effects.extend(split.DropAnswer(key) for key in self.answers)
            self.answers.clear()
            book = attrs.evolve(book, incarnation=event.incarnation)
        self.book, self.connected = book, True
        return effects

    def is_here(self, key: UploadKey) -> bool:
        """Whether the life that made `key` has a session."""
        return self.connected and key.incarnation == self.incarnation

    def trained(self, key: UploadKey) -> bool:
        """Whether a key was trained, or is of a life whose successor was."""
        return self.book.last is not None and key <= self.book.last

    def answer_to(self, key: UploadKey, in_flight: int) -> Answer | None:
        """What is said to an offer before it is transferred; None: it is welcome."""
        for known, answer in self.declined:
            if known == key:
                return answer
        if self.trained(key):
            return Answer("known", "trained before")
        upload = self.uploads.get(key)
        if upload is not None:
            return Answer("here", "it is here already") if upload.here else None
        if self.uploads and key < next(reversed(self.uploads)):
            return Answer("order", "a later upload was offered before it")
        if key.leg and self.open_step != key.first_leg:
            return Answer("gone", "its first leg is not open here")
        if sum(other.incarnation == key.incarnation for other in self.uploads) >= in_flight:
            return Answer("later", f"more than {in_flight} at a time")
        return None

    def ready(self) -> list[UploadKey]:
        """Mark and return those that have become trainable: here, with nothing before them that is not."""
        found = []
        for key, upload in self.uploads.items():
            if not upload.here:
                break
            if not upload.queued:
                upload.queued = True
                found.append(key)
        return found

    def lose_session(self) -> list[UploadKey]:
        """The session is over: forget what is not complete, and what is behind it. Returns those that are forgotten."""
        self.connected = self.over = False
        self.open_step = None
        gone = [key for key, upload in self.uploads.items() if not upload.queued]
        for key in gone:
            del self.uploads[key]
        return gone


def refusal_of(
    event: ev.SplitClientHello, run: str, architecture: Mapping[str, str]
) -> tuple[str, str] | None:
    """Why a client does not belong to this run, as a code and a sentence that says what to do; None when it does."""
    if event.peer == PS_ROLE:
        text = (
            f"{PS_ROLE} is the parameter server's name here; start the client with another --name"
        )
        return "name", text
    if not event.run:
        text = f"{event.peer} is in no run yet: it has to join the parameter server first"
        return "run", text
    if run and event.run != run:
        text = (
            f"this server is in run {run}, but {event.peer} is in run {event.run}:"
            " give every run a split server, and a folder, of its own"
        )
        return "run", text
    for name in {**architecture, **event.architecture}:
        here, there = architecture.get(name, "none"), event.architecture.get(name, "none")
        if here != there:
            text = (
                f"{name} of {event.peer} is {there}, and {here} at the split server;"
                " use the same configuration at every node"
            )
            return "model", text
    return None


def replicas_due(peers: Iterable[Peer], averaged: int, round_: int) -> split.AverageReplicas | None:
    """The replicas of those who are done with the newest round before `round_` that is not averaged; None: there is none."""
    done = {
        peer.name: peer.book
        for peer in peers
        if averaged < peer.book.done_round < round_ and peer.book.done_samples > 0
    }
    if not done:
        return None
    newest = max(book.done_round for book in done.values())
    samples = {name: book.done_samples for name, book in done.items() if book.done_round == newest}
    return split.AverageReplicas(newest, samples)

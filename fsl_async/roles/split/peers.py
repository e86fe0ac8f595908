"""What the split server holds of one client.

Its book, its session, and its uploads between offer and training. Pure.

A client's uploads are trained in the order of their keys, so that its last trained key stands for
all before it. A received upload waits for those offered before it; uploads behind one that was not
received are dropped with the session, and the client offers them again.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import attrs
from attrs import Factory, define, field, frozen, mutable

from fsl_async.roles.machine import Effect, Greeted
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import ClientProgress
from fsl_async.roles.split.messages import UploadKey

REMEMBERED = 16
"""Declined keys of a client that get the same answer again; it has fewer under way."""


@mutable
class Upload:
    """An upload that is not trained yet."""

    offer: msg.SmashedMeta
    received: bool = False
    queued: bool = False


@frozen
class Answer:
    """Why an upload is not taken, with a sentence.

    code: known | here | later | stale | gone | order | refused.
    """

    code: str
    text: str


@define
class Peer:
    """One client. `uploads` are in the order of their keys, which is the order of their offers."""

    name: str
    book: ClientProgress = Factory(ClientProgress)
    connected: bool = False
    run_over: bool = False  # reported in this session
    uploads: dict[UploadKey, Upload] = field(factory=dict)
    answers: dict[UploadKey, msg.GradientMeta] = field(factory=dict)  # kept, oldest first
    declined: deque[tuple[UploadKey, Answer]] = field(factory=lambda: deque(maxlen=REMEMBERED))
    open_step: UploadKey | None = None  # U-shape: the first leg whose second leg is awaited

    @property
    def incarnation(self) -> int:
        """The newest one that has had a session."""
        return self.book.incarnation

    @property
    def last_trained(self) -> str:
        """Text of the last trained upload of this incarnation; empty where there is none."""
        last = self.book.last
        return last.text if last is not None and last.incarnation == self.incarnation else ""

    def begin_session(self, event: Greeted[msg.SplitHello]) -> list[Effect]:
        """It is admitted: take over its hello. Answers to another incarnation of it are dropped."""
        hello = event.message
        seen = max(self.book.auxiliary_seen, hello.auxiliary)
        book = attrs.evolve(self.book, auxiliary_seen=seen)
        if hello.done_round > book.done_round:
            book = attrs.evolve(book, done_round=hello.done_round, done_samples=hello.done_samples)
        effects: list[Effect] = []
        if event.incarnation != book.incarnation:
            effects.extend(split.DropAnswer(key) for key in self.answers)
            self.answers.clear()
            book = attrs.evolve(book, incarnation=event.incarnation)
        self.book, self.connected = book, True
        return effects

    def is_connected(self, key: UploadKey) -> bool:
        """Whether the incarnation that made `key` has a session."""
        return self.connected and key.incarnation == self.incarnation

    def trained(self, key: UploadKey) -> bool:
        """Whether a key was trained, or is of an incarnation whose successor's was."""
        return self.book.last is not None and key <= self.book.last

    def answer_to(self, key: UploadKey, in_flight: int) -> Answer | None:
        """The answer to an offer before it is transferred; None: it is taken."""
        for known, answer in self.declined:
            if known == key:
                return answer
        if self.trained(key):
            return Answer("known", "trained before")
        upload = self.uploads.get(key)
        if upload is not None:
            return Answer("here", "it is here already") if upload.received else None
        if self.uploads and key < next(reversed(self.uploads)):
            return Answer("order", "a later upload was offered before it")
        if key.leg and self.open_step != key.first_leg:
            return Answer("gone", "its first leg is not open here")
        if sum(other.incarnation == key.incarnation for other in self.uploads) >= in_flight:
            return Answer("later", f"more than {in_flight} at a time")
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

    def lose_session(self) -> list[UploadKey]:
        """The session is over: forget uploads that are not trainable, and return their keys."""
        self.connected = self.run_over = False
        self.open_step = None
        lost = [key for key, upload in self.uploads.items() if not upload.queued]
        for key in lost:
            del self.uploads[key]
        return lost


def refusal_of(
    event: Greeted[msg.SplitHello], run: str, architecture: Mapping[str, str]
) -> tuple[str, str] | None:
    """Why a client does not belong to this run, as a code and a sentence with the remedy.

    None when it does.
    """
    peer, hello = event.peer, event.message
    if peer == msg.PS_ROLE:
        text = (
            f"{msg.PS_ROLE} is the parameter server's name here;"
            " start the client with another --name"
        )
        return "name", text
    if not hello.run:
        text = f"{peer} is in no run yet: it has to join the parameter server first"
        return "run", text
    if run and hello.run != run:
        text = (
            f"this server is in run {run}, but {peer} is in run {hello.run}:"
            " give every run a split server, and a folder, of its own"
        )
        return "run", text
    for name in {**architecture, **hello.architecture}:
        here, there = architecture.get(name, "none"), hello.architecture.get(name, "none")
        if here != there:
            text = (
                f"{name} of {peer} is {there}, and {here} at the split server;"
                " use the same configuration at every node"
            )
            return "model", text
    return None


def replicas_due(peers: Iterable[Peer], averaged: int, round_: int) -> split.AverageReplicas | None:
    """The replicas of the newest round before `round_` that is not averaged.

    Those of the clients that are done with it; None: there is no such round.
    """
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

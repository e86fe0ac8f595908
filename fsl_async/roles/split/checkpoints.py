"""Decides when the split server makes a checkpoint, and records its content. Pure.

A checkpoint is due every `every` changes, and when one is requested and anything has changed. It is
made between two trainings, so that book and tensors are consistent. One is written at a time; a
failed one is tried again after `RETRY_S`.
"""

from collections.abc import Callable

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect, Note
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split import effects as split
from fsl_async.roles.split.events import SplitProgress, SplitRecovered, UploadKey

CHECKPOINT_EVERY = 100
RETRY_S = 30.0


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

    def due(self, book: Callable[[], SplitProgress]) -> list[Effect]:
        """The checkpoint that is due, if it can be made now; call it between two trainings."""
        waits = self.writing is not None or self.deadlines.when("retry") is not None
        if not self.is_due or waits:
            return []
        made = book()
        self.is_due, self.since, self.number = False, 0, self.number + 1
        self.writing = {
            name: kept.last for name, kept in made.clients.items() if kept.last is not None
        }
        return [split.Checkpoint(self.number, made)]

    def written(self) -> dict[str, UploadKey]:
        """Record that it is durable, or given up. Returns each client's last upload in it."""
        found, self.writing = self.writing or {}, None
        return found

    def failed(self, now: float) -> None:
        """Record that it could not be written, and try again later."""
        self.writing, self.is_due = None, True
        self.deadlines.set("retry", now + RETRY_S)


def resumed(event: SplitRecovered) -> list[Effect]:
    """A note and ledger lines for a split server that goes on from its last checkpoint."""
    if not event.book.uploads and not event.lost:
        return []
    text = f"continuing after {counted(event.book.uploads, 'upload')}"
    if event.lost:
        lost = counted(len(event.lost), "upload")
        text += f"; {lost} since the last checkpoint are lost unless clients still have them"
    why = "trained after the last checkpoint of a split server that died"
    return [Note(text), *(split.RecordUpload(key, "dropped", why) for key in event.lost)]

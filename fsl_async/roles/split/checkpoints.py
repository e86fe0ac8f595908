"""When the split server makes a checkpoint, and what the one under way holds. Pure.

A checkpoint is due every `every` changes, and when one is wanted and anything has changed. It is
made between two trainings, so that book and tensors are of one moment. There is one at a time; a
failed one is tried again after `retry_s`.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect, Note
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split import effects as split
from fsl_async.roles.split.events import SplitProgress, SplitRecovered, UploadKey


@mutable
class Checkpoints:
    """The server's checkpoints. They share its deadlines; "retry" is theirs."""

    deadlines: Deadlines
    every: int
    retry_s: float
    number: int = 0  # of the last one in this process
    since: int = 0  # changes since it was begun
    wanted: bool = False
    writing: dict[str, UploadKey] | None = None  # client -> last upload in the one under way

    def changed(self) -> None:
        """Something was trained, aligned or averaged."""
        self.since += 1
        self.wanted = self.wanted or self.since >= self.every

    def want(self) -> None:
        """One is due now, if anything has changed."""
        self.wanted = self.wanted or self.since > 0

    def due(self, book: Callable[[], SplitProgress]) -> list[Effect]:
        """The checkpoint that is due, if it can be made now; call it between two trainings."""
        waits = self.writing is not None or self.deadlines.when("retry") is not None
        if not self.wanted or waits:
            return []
        made = book()
        self.wanted, self.since, self.number = False, 0, self.number + 1
        self.writing = {
            name: kept.last for name, kept in made.clients.items() if kept.last is not None
        }
        return [split.Checkpoint(self.number, made)]

    def written(self) -> dict[str, UploadKey]:
        """The one under way is durable, or given up. Returns each client's last upload in it."""
        found, self.writing = self.writing or {}, None
        return found

    def failed(self, now: float) -> None:
        """The one under way could not be written."""
        self.writing, self.wanted = None, True
        self.deadlines.set("retry", now + self.retry_s)


def resumed(event: SplitRecovered) -> list[Effect]:
    """A note and ledger lines for a server that goes on from its last checkpoint."""
    if not event.book.uploads and not event.lost:
        return []
    text = f"continuing after {counted(event.book.uploads, 'upload')}"
    if event.lost:
        lost = counted(len(event.lost), "upload")
        text += f"; {lost} since the last checkpoint are lost unless clients still have them"
    why = "trained after the last checkpoint of a server that died"
    return [Note(text), *(split.RecordUpload(key, "dropped", why) for key in event.lost)]

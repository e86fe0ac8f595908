"""When the split server makes a checkpoint, and what it has. Pure.

One is due every so many changes, and whenever somebody wants one and anything has changed. It is made between two trainings, so that book
and tensors are of one moment. There is one at a time; a failed one is tried again after a while.
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
    """The server's checkpoints. They share its deadlines; "retry" is their own."""

    deadlines: Deadlines
    every: int
    retry_s: float
    number: int = 0  # of the last one in this process
    since: int = 0  # changes since it was begun
    wanted: bool = False
    writing: dict[str, UploadKey] | None = None  # client -> last upload that the one under way has

    def changed(self) -> None:
        """Something was trained, aligned or averaged."""
        self.since += 1
        self.wanted = self.wanted or self.since >= self.every

    def want(self) -> None:
        """One is due now, if there is anything new."""
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
        """It is durable, or given up. Returns what it has."""
        found, self.writing = self.writing or {}, None
        return found

    def failed(self, now: float) -> None:
        """It could not be written."""
        self.writing, self.wanted = None, True
        self.deadlines.set("retry", now + self.retry_s)


def resumed(event: SplitRecovered) -> list[Effect]:
    """What is said and entered when a server goes on from its last checkpoint."""
    if not event.book.uploads and not event.lost:
        return []
    text = f"continuing after {counted(event.book.uploads, 'upload')}"
    if event.lost:
        text += f"; {counted(len(event.lost), 'upload')} since the last checkpoint are lost unless clients still have them"
    why = "trained after the last checkpoint of a server that died"
    return [Note(text), *(split.RecordUpload(key, "dropped", why) for key in event.lost)]

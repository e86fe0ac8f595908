"""A journal that also tells the operator what happens, in the same words as `fsl-node status` and the live table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fsl_async.observe.journal import JournalWriter, as_fields
from fsl_async.observe.state import RunState, tells_something
from fsl_async.observe.table import news_fields
from fsl_async.roles.machine import Note


class Reporter:
    """Writes to `journal`, and says what a `RunState` of the same lines has to tell. Used on the loop thread only.

    say: takes one line; in its place `record`, where there is one, takes a kind and fields. now: the shell's clock, for notes that come from no machine. clock: seconds since 1970.
    """

    def __init__(
        self,
        journal: JournalWriter,
        say: Callable[[str], None],
        now: Callable[[], float],
        clock: Callable[[], float] = time.time,
        record: Callable[..., None] | None = None,
    ) -> None:
        self._journal = journal
        self._say = say
        self._now = now
        self._clock = clock
        self._record = record
        self._state = RunState()
        self._last: Any = None

    def event(self, event: Any, now: float, cause: int | None = None) -> int:
        """Write an event; returns its number."""
        self._tell(event)
        return self._journal.event(event, now, cause)

    def effect(self, effect: Any, now: float, cause: int | None = None) -> int:
        """Write an effect; returns its number."""
        self._tell(effect)
        self._last = effect
        return self._journal.effect(effect, now, cause)

    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int:
        """Write a note; returns its number."""
        self._apply(name, fields)
        return self._journal.note(name, now, cause, **fields)

    def say(self, note: Note) -> None:
        """Carry a Note out. One of the machine was told when it was written down; one of the shell is written here."""
        if note is not self._last:
            self.note("note", self._now(), text=note.text, level=note.level)

    def _tell(self, item: Any) -> None:
        name = str(item.tag)
        if tells_something(name):
            self._apply(name, as_fields(item))

    def _apply(self, name: str, fields: dict[str, Any]) -> None:
        stamp = self._clock()
        for news in self._state.apply({"t": stamp, "type": name, **fields}):
            if news.kind == "server":  # the command says itself where it listens
                continue
            if self._record is not None:
                self._record(news.kind, **news_fields(self._state, news))
            else:
                self._say(f"{time.strftime('%H:%M:%S', time.localtime(stamp))}  {news.text}")

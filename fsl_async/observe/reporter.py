"""Watching a running server: a journal that prints its news, and a count of unreadable messages.

The lines are those of `fsl-node status --follow` and of `demo`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.journal_lines import as_fields, fact_fields, type_of
from fsl_async.observe.run_state import SPLIT_SERVER, RunState, tells_something
from fsl_async.observe.table import news_fields
from fsl_async.roles.machine import Note

GARBAGE_EVERY_S = 1.0

_AT_PS = frozenset({"joined", "relaunched", "reconnected", "gone"})
"""News of clients that the parameter server prints: a split server does not print them again."""


class Reporter:
    """Writes to `journal` and prints the news of a `RunState` of its lines. On the loop thread.

    say: takes one line; instead of it `record`, if given, takes a kind and fields. now: the shell's
    clock, for notes that come from no machine. clock: seconds since 1970.
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

    def fact(self, fact: Any, now: float, cause: int | None = None) -> int:
        """Write a fact; returns its number."""
        self._apply(fact.tag, {"now": now, **fact_fields(fact)})
        return self._journal.fact(fact, now, cause)

    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int:
        """Write a note; returns its number."""
        self._apply(name, fields)
        return self._journal.note(name, now, cause, **fields)

    def say(self, note: Note) -> None:
        """Carry a Note out: the machine's was told when it was written, the shell's is now."""
        if note is not self._last:
            self.note("note", self._now(), text=note.text, level=note.level)

    def _tell(self, item: Any) -> None:
        name = type_of(item)
        if tells_something(name):
            self._apply(name, as_fields(item))

    def _apply(self, name: str, fields: dict[str, Any]) -> None:
        stamp = self._clock()
        for news in self._state.apply({"t": stamp, "type": name, **fields}):
            if news.kind == "server":  # the command prints itself where it listens
                continue
            if self._state.node.role == SPLIT_SERVER and news.kind in _AT_PS:
                continue
            if self._record is not None:
                self._record(news.kind, **news_fields(self._state, news))
            else:
                self._say(f"{time.strftime('%H:%M:%S', time.localtime(stamp))}  {news.text}")


class GarbageWatch:
    """Writes to the journal how many messages were not of this program, whenever there are more."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, endpoint: tp.ListenerEndpoint, journal: Reporter
    ) -> None:
        self._loop, self._endpoint, self._journal = loop, endpoint, journal
        self._seen = 0
        self._timer = loop.call_later(GARBAGE_EVERY_S, self._look)

    def _look(self) -> None:
        if self._endpoint.garbage > self._seen:
            self._seen = self._endpoint.garbage
            self._journal.note("unreadable_messages", self._loop.time(), garbage=self._seen)
        self._timer = self._loop.call_later(GARBAGE_EVERY_S, self._look)

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()

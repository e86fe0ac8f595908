"""The shell around a pure machine: feeds events, carries out effects in order, arms one timer.

The same `Node` runs in production, where the scheduler is an asyncio loop and the worker a thread,
and in the simulator, where both are virtual. Nothing here depends on a role: a role's `execute`
carries out its effects.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fsl_async.roles.machine import Received, TimerFired
from fsl_async.roles.messages import MessageError

if TYPE_CHECKING:
    from fsl_async.roles.machine import Effect, Event, Fact
    from fsl_transport import Cancellable, Scheduler, TransportEvent


T = TypeVar("T")
log = logging.getLogger(__name__)

_Job = tuple[Callable[[], Any], Callable[[Any], None], Callable[[Exception], None]]
_RESULTS_AT_ONCE = 16
"""Results of a worker that the loop handles in one turn."""


class Machine(Protocol):
    """A pure role."""

    def check(self, event: Received[Any]) -> None:
        """Raise MessageError for a message that its peer may not send."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out."""

    def next_deadline(self) -> float | None:
        """When a TimerFired is due."""


class Journal(Protocol):
    """Records every event, effect and fact with its cause."""

    def event(self, event: Any, now: float, cause: int | None = None) -> int:
        """Write an event; returns its running number, the cause of the effects that follow."""

    def effect(self, effect: Any, now: float, cause: int | None = None) -> int:
        """Write an effect; returns its running number, the cause of the event it ends in."""

    def fact(self, fact: Any, now: float, cause: int | None = None) -> int:
        """Write a fact; returns its running number."""


class Worker(Protocol):
    """Runs slow jobs (disk, codec) one after another, in order, away from the loop."""

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        """Run `job`, then call `done(result)` or `failed(error)` on the loop thread."""

    def close(self) -> None:
        """Finish the submitted jobs; later callbacks are dropped."""


class Node:
    """One machine, its journal and its timer.

    Events that arrive while effects are being carried out wait until those are done, so a machine
    gets one event at a time and its effects happen in order.
    """

    def __init__(
        self,
        machine: Machine,
        scheduler: Scheduler,
        execute: Callable[[Effect, int], None],
        journal: Journal,
        facts: Callable[[Event, list[Effect]], list[Fact]] = lambda _event, _effects: [],
    ) -> None:
        """facts: returns the facts that an event and its effects have changed."""
        self.machine = machine
        self._scheduler = scheduler
        self._execute = execute
        self._journal = journal
        self._facts = facts
        self._waiting: deque[tuple[Event, int | None]] = deque()
        self._running = False
        self._timer: Cancellable | None = None
        self._armed_for: float | None = None
        self._closed = False
        self._arm()

    def feed(self, event: Event, cause: int | None = None) -> None:
        """Give the machine an event; `cause` is the journal number of the effect that it ends.

        Raises MessageError for a message that its peer may not send, which is in no journal.
        """
        if self._closed:
            return
        if isinstance(event, Received):
            self.machine.check(event)
        self._waiting.append((event, cause))
        if self._running:
            return
        self._running = True
        try:
            while self._waiting:
                self._step(*self._waiting.popleft())
        finally:
            self._running = False
        self._arm()

    def _step(self, event: Event, cause: int | None) -> None:
        now = self._scheduler.time()
        number = self._journal.event(event, now, cause)
        effects = self.machine.handle(event, now)
        for fact in self._facts(event, effects):
            self._journal.fact(fact, now, number)
        for effect in effects:
            self._execute(effect, self._journal.effect(effect, now, number))

    def _arm(self) -> None:
        when = None if self._closed else self.machine.next_deadline()
        if when == self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_for = when
        if when is not None:
            self._timer = self._scheduler.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._armed_for = None
        self.feed(TimerFired())

    def close(self) -> None:
        """Stop: no event reaches the machine any more."""
        self._closed = True
        self._waiting.clear()
        self._arm()


class Shell:
    """Base of the shells of one machine and one endpoint: two tables of handlers, one by the type
    of a transport event, one by the type of an effect.

    A shell feeds the messages of its peers as they came. A MessageError, of `Node.feed` or of its
    own checks, ends the peer's session.
    """

    node: Node
    _on_transport: dict[type, Callable[[Any], None]]
    _executors: dict[type, Callable[[Any, int], None]]

    def on_transport(self, event: TransportEvent) -> None:
        """Take one event of the endpoint."""
        handler = self._on_transport.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except (MessageError, ValueError) as error:
            self._violated(getattr(event, "peer", ""), error)

    def _violated(self, peer: str, error: Exception) -> None:
        """End the session of a peer that broke the protocol."""
        raise NotImplementedError

    def _execute(self, effect: Effect, number: int) -> None:
        self._executors[type(effect)](effect, number)


class ThreadWorker:
    """A worker with one thread beside an asyncio loop.

    A stream has thousands of jobs a second, and waking a thread or the loop costs more than the job
    of a chunk: results that come close together wake the loop once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_called = False
        """Whether the loop was asked to deliver, and has not begun to."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        """Run `job` in the thread, then `done` or `failed` on the loop."""
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, done, failed))

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            if self._closed:
                continue
            job, done, failed = item
            try:
                self._results.append((done, job()))
            except Exception as error:  # noqa: BLE001 - the loop decides about any error
                self._results.append((failed, error))
            except BaseException as error:  # noqa: BLE001 - a native library's panic is one
                self._results.append((failed, RuntimeError(f"a job ended with {error!r}")))
            del item, job, done, failed  # the last chunk must not stay in memory until the next
            if not self._is_called:
                self._is_called = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    log.debug("loop closed before a job's result")

    def _deliver(self) -> None:
        """Pass on some results; more of them wait for other work of the loop."""
        self._is_called = False  # first: a result that comes from here on asks again
        try:
            for _ in range(min(len(self._results), _RESULTS_AT_ONCE)):
                callback, value = self._results.popleft()
                if not self._closed:
                    callback(value)
        finally:
            if self._results and not self._is_called:
                self._is_called = True
                self._loop.call_soon(self._deliver)

    def close(self) -> None:
        """Wait for the running job, and drop the others."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()


EVERY_S = 0.1
KEPT = 3000


class LoopLag:
    """Measures the lag of a running loop until closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags_s: deque[float] = deque(maxlen=KEPT)
        self._timer = loop.call_later(EVERY_S, self._fire, loop.time() + EVERY_S)

    def _fire(self, asked_for: float) -> None:
        now = self._loop.time()
        self._lags_s.append(max(0.0, now - asked_for))
        self._timer = self._loop.call_later(EVERY_S, self._fire, now + EVERY_S)

    def summary(self) -> dict[str, float]:
        """Return median, 99th percentile and maximum in milliseconds; empty at the beginning."""
        lags = sorted(self._lags_s)
        if not lags:
            return {}
        parts = {"lag_median_ms": 0.5, "lag_p99_ms": 0.99, "lag_max_ms": 1.0}
        last = len(lags) - 1
        return {
            name: round(1000 * lags[min(last, int(part * len(lags)))], 3)
            for name, part in parts.items()
        }

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

"""Stopper: how an operator ends a node. Asked once it drains (finishes the round, saves), asked twice it stops at once.

The command makes one and hands it to the blocking function that runs the node; signals, the supervisor's TERM and tests all
go through `request`. Python-level handlers are used, not `loop.add_signal_handler`: they also work when the loop runs in
another thread (a user's own script keeps the main thread for training), and on asyncio and uvloop alike.

    SIGINT, first     drain        exit code 130
    SIGTERM, first    drain        exit code 64: whoever preempts us should start us again
    either, again     stop hard
    either, third     KeyboardInterrupt where the program stands
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from fsl_async.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_REASONS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopper:
    """Thread-safe and safe in a signal handler: asking takes no lock that the interrupted code may hold.

    `callbacks` are called with `hard` in the thread that asked, once for draining and once more for stopping hard; a loop
    hangs `lambda hard: loop.call_soon_threadsafe(...)` in here by `subscribe`.
    """

    def __init__(self) -> None:
        self.requested = False
        self.hard = False
        self.reason = ""
        self.exit_code = int(ExitCode.DONE)
        self.callbacks: list[Callable[[bool], None]] = []
        # Reentrant: a signal may come while the same thread is inside.
        self._lock = threading.RLock()

    def request(
        self, *, hard: bool = False, reason: str = "asked", exit_code: int = ExitCode.DONE
    ) -> None:
        """Ask for an end. The first reason and exit code are kept; asking the same again does nothing."""
        with self._lock:
            if self.requested and (self.hard or not hard):
                return
            if not self.requested:
                self.reason = reason
                self.exit_code = int(exit_code)
            self.requested = True
            self.hard = hard
            told = tuple(self.callbacks)
        for callback in told:
            callback(hard)

    def subscribe(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call `callback(hard)` when asked, or now when it was asked already; returns a function that takes it off."""
        with self._lock:
            self.callbacks.append(callback)
            asked, hard = self.requested, self.hard
        if asked:
            callback(hard)

        def remove() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self.callbacks.remove(callback)

        return remove


@contextlib.contextmanager
def stop_on_signals(stopper: Stopper, *, quiet: bool = False) -> Iterator[None]:
    """Let SIGINT and SIGTERM ask `stopper`, until the block ends. Only the main thread may enter it."""

    def handle(number: int, _: FrameType | None) -> None:
        which = signal.Signals(number)
        if stopper.hard:
            raise KeyboardInterrupt
        again = stopper.requested
        code = ExitCode.INTERRUPTED if which == signal.SIGINT else ExitCode.RELAUNCH
        if not quiet:
            _tell(
                "stopping now"
                if again
                else f"{_REASONS[which]}: finishing in good order; once more stops at once"
            )
        stopper.request(hard=again, reason=_REASONS[which], exit_code=code)

    before = {which: signal.signal(which, handle) for which in _REASONS}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _tell(text: str) -> None:
    # Not print: the signal may have interrupted a print, and buffered writers are not reentrant.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())

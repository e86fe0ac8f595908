"""Ends a node on request: the first one drains (finishes the round, saves), the second one stops.

A command makes a `Stopper` for the blocking function that runs the node; signals, the supervisor's
SIGTERM and tests all call `request`. Handlers are Python's, not `loop.add_signal_handler`: they
also work when the loop runs in another thread (a user's script trains in the main thread), with
asyncio and uvloop.

    SIGINT, first   drain, exit code 130
    SIGTERM, first  drain, exit code 64: a launcher should start the process again (a parameter
                    server leaves, and its run goes on)
    either, again   stop hard; a copy of the first SIGTERM is the same request
    either, third   KeyboardInterrupt
    either, later   after the block of a process that ends: its exit code, at once
    SIGUSR2         drain, exit code 64, in clients only: a warning before SIGTERM, never a second
                    signal

With `at_once` the second signal raises KeyboardInterrupt, and the process ends at most `AT_ONCE_S`
later: the user's code may sleep, catch every exception, or be in a call that runs for minutes and
lets no Python handler run.

A Slurm job gets SIGTERM as a process group, and its batch script forwards another copy: the node
receives it twice, milliseconds apart. So a SIGTERM within `SAME_REQUEST_S` of the first one is the
same request, unless a terminal is attached, where a person may send it. Ctrl-C twice always stops
at once.

Lines are written by a thread: a terminal may not be read (Ctrl-S, a pty without a reader), and
write(2) then blocks, for a terminal also after poll(2). O_NONBLOCK would apply to the open file,
which the shell and other processes share.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import enum
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from fsl_async.errors import ExitCode, InterruptedByUserError, PreemptedError, StopError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from fsl_async.process.notices import Notice


_PATIENCE_S = 0.5


def is_attended() -> bool:
    """Whether standard input, output or error is a terminal, as it is not under a scheduler."""
    return any(os.isatty(file) for file in (0, 1, 2))


def write_if_room(file: int, data: bytes) -> None:
    """Write in a thread, which may block for ever; wait at most `_PATIENCE_S`. No errors.

    Not by `threading`: the code that a signal interrupted may hold its locks.
    """
    over = _thread.allocate_lock()
    over.acquire()

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(file, data)
        over.release()

    with contextlib.suppress(RuntimeError):  # there is no room for a thread
        _thread.start_new_thread(write, ())
        over.acquire(timeout=_PATIENCE_S)


SAME_REQUEST_S = 2.0
"""A forwarded copy comes within milliseconds, a scheduler's next SIGTERM many seconds later."""


class Asked(enum.Enum):
    """The request that a signal makes."""

    END = "end"
    """A drained end."""
    SAME = "same"
    """Nothing new: a copy of the first signal."""
    AT_ONCE = "at once"
    """An immediate end."""


class StopRequests:
    """Classifies SIGINT and SIGTERM. attended: a terminal is attached, so copies do not occur."""

    def __init__(self, *, attended: bool) -> None:
        self._attended = attended
        self._first: tuple[str, float] | None = None

    def ask(self, name: str, now: float) -> Asked:
        """Take the signal `name` at `now` (monotonic seconds)."""
        if self._first is None:
            self._first = (name, now)
            return Asked.END
        first, at = self._first
        is_copy = name == first == "SIGTERM" and now - at <= SAME_REQUEST_S
        return Asked.SAME if is_copy and not self._attended else Asked.AT_ONCE


_handles: set[Any] = set()
"""Handlers of the blocks that are open, which a forked process must not keep."""
_resting: set[signal.Signals] = set()
"""Signals that are left to handlers of `_leave`."""
AT_ONCE_S = 0.7

INTERRUPTED_BY = "FSL_INTERRUPTED_BY"
"""A variable of the environment: what SIGINT means to a node that another program has started."""
_REASONS = {
    signal.SIGINT: os.environ.get(INTERRUPTED_BY) or "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
}


class Stopper:
    """Holds the request to end. Thread-safe, and safe in a signal handler: its lock is reentrant.

    `callbacks` are called with `hard` in the requesting thread, once for draining and once for
    stopping hard; a loop subscribes `lambda hard: loop.call_soon_threadsafe(...)`. `deadline`
    (monotonic seconds) is when this process will be killed, if that is known; a nearer one calls
    the callbacks again.
    """

    def __init__(self) -> None:
        self.requested = False
        self.hard = False
        self.reason = ""
        self.exit_code = int(ExitCode.DONE)
        self.deadline: float | None = None
        self.callbacks: list[Callable[[bool], None]] = []
        # Reentrant: a signal may come while the same thread is inside.
        self._lock = threading.RLock()

    def request(
        self,
        *,
        hard: bool = False,
        reason: str = "asked",
        exit_code: int = ExitCode.DONE,
        deadline: float | None = None,
    ) -> None:
        """Request an end. The first reason and exit code count; a repeated request does nothing."""
        with self._lock:
            nearer = deadline is not None and (self.deadline is None or deadline < self.deadline)
            if self.hard or (self.requested and not hard and not nearer):
                return
            if nearer:
                self.deadline = deadline
            if not self.requested:
                self.reason = reason
                self.exit_code = int(exit_code)
            self.requested = True
            self.hard = hard
            callbacks = tuple(self.callbacks)
        for callback in callbacks:
            callback(hard)

    @property
    def comes_back(self) -> bool:
        """Whether the exit code requests a relaunch: the process ends, its run or task goes on."""
        return self.exit_code == ExitCode.RELAUNCH

    def error(self, text: str = "") -> StopError:
        """Return the exception for a requested end. text: instead of the reason."""
        is_user = self.exit_code == ExitCode.INTERRUPTED
        return (InterruptedByUserError if is_user else PreemptedError)(text or self.reason)

    def subscribe(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call `callback(hard)` at each request, and now if there was one already.

        Returns a function that unsubscribes it.
        """
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
def stop_on_signals(
    stopper: Stopper,
    *,
    quiet: bool = False,
    at_once: bool = False,
    as_json: bool = False,
    notices: Callable[[str], Notice] | None = None,
    ends: bool = True,
) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into requests to `stopper` until the block ends. Main thread only.

    at_once: see above. as_json: a process that ends in this way prints a JSON object on standard
    output. notices: maps a signal's name to the time that is left; SIGUSR2 is handled only with it.
    ends: the process ends after a block in which an end was requested; signals that come while it
    does leave its exit code as it is.
    """
    process = os.getpid()
    requests = StopRequests(attended=is_attended())
    killer = _Killer(stopper, as_json=as_json, quiet=quiet) if at_once else None

    def handle(number: int, _: FrameType | None) -> None:
        which = signal.Signals(number)
        is_warning = which not in _REASONS
        asked = Asked.END if is_warning else requests.ask(which.name, time.monotonic())
        if asked is Asked.SAME:
            return
        if stopper.hard and not is_warning:
            raise KeyboardInterrupt
        again = asked is Asked.AT_ONCE
        code = ExitCode.INTERRUPTED if which == signal.SIGINT else ExitCode.RELAUNCH
        reason = _REASONS.get(which, which.name)
        deadline = _deadline(notices, which)
        if not quiet and not again:
            more = "" if is_warning else "; once more stops at once"
            _tell(f"{reason}: finishing in good order{more}")
        elif not quiet and killer is None:
            _tell("stopping now")
        stopper.request(hard=again, reason=reason, exit_code=code, deadline=deadline)
        if again and killer is not None:
            killer.start()
            raise KeyboardInterrupt

    handled = [*_REASONS, *([signal.SIGUSR2] if notices is not None else [])]
    before = {which: signal.signal(which, handle) for which in handled}
    _handles.add(handle)
    if killer is not None:
        killer.listen()
    try:
        yield
    finally:
        _handles.discard(handle)
        if os.getpid() == process:  # no worker, forked within the block
            if killer is not None:
                killer.close()
            _leave(before, requests, stopper.exit_code if ends and stopper.requested else None)


def _leave(
    before: dict[signal.Signals, Any], requests: StopRequests, exit_code: int | None
) -> None:
    """Restore handlers, or, if the process ends with an exit code, end it at once if asked again.

    Copies of the first SIGTERM, and warnings, change nothing.
    """

    def handle(number: int, _: FrameType | None) -> None:
        which = signal.Signals(number)
        if which in _REASONS and requests.ask(which.name, time.monotonic()) is Asked.AT_ONCE:
            os._exit(exit_code or 0)

    for which, handler in before.items():
        signal.signal(which, handler if exit_code is None else handle)
    _resting.update(before if exit_code is not None else ())


@atexit.register
def _ignore_resting() -> None:
    """Ignore signals at the very end, where Python restores the system's handlers."""
    for which in _resting:
        signal.signal(which, signal.SIG_IGN)


def _in_worker() -> None:
    """Reset the signals of a forked process, such as a data loader's worker: SIGTERM ends it.

    Ctrl-C does nothing there: it also reaches the parent, which may need the worker for its end.
    """
    if signal.getsignal(signal.SIGTERM) in _handles:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.set_wakeup_fd(-1)  # the other end is the parent's


os.register_at_fork(after_in_child=_in_worker)


def _deadline(notices: Callable[[str], Notice] | None, which: signal.Signals) -> float | None:
    """Return when this process will be killed, in monotonic seconds; Ctrl-C has no deadline."""
    if notices is None or which == signal.SIGINT:
        return None
    left_s = notices(which.name).left_s
    return None if left_s is None else time.monotonic() + left_s


class _Killer:
    """Ends the process `AT_ONCE_S` after the second signal.

    It receives signals by a wakeup descriptor, also while the main thread runs no Python code.
    """

    def __init__(self, stopper: Stopper, *, as_json: bool, quiet: bool) -> None:
        self._stopper = stopper
        self._requests = StopRequests(attended=is_attended())
        self._as_json = as_json
        self._quiet = quiet
        self._over = threading.Event()
        self._once = threading.Lock()
        self._before = -1
        self._forget: Callable[[], None] | None = None
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)

    def listen(self) -> None:
        """Begin to receive signals. Call it in the main thread."""
        self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        # Also after a hard request that is no signal.
        self._forget = self._stopper.subscribe(lambda hard: self.start() if hard else None)
        threading.Thread(target=self._receive, name="signals", daemon=True).start()

    def _receive(self) -> None:
        first: signal.Signals | None = None
        while not self._over.is_set():
            try:
                numbers = self._ours.recv(64)
            except OSError:
                return
            if not numbers:
                return
            for which in [signal.Signals(one) for one in numbers if one in set(_REASONS)]:
                first = first or which
                if self._requests.ask(which.name, time.monotonic()) is not Asked.AT_ONCE:
                    continue
                code = ExitCode.INTERRUPTED if first == signal.SIGINT else ExitCode.RELAUNCH
                self._stopper.request(reason=_REASONS[first], exit_code=code)
                self._stopper.request(hard=True)
                self.start()
                return

    def start(self) -> None:
        """Start the time limit, once."""
        if self._once.acquire(blocking=False):
            if not self._quiet:
                _tell("stopping now")
            threading.Thread(target=self._end, name="end", daemon=True).start()

    def _end(self) -> None:
        if self._over.wait(AT_ONCE_S):
            return
        found = describe(self._stopper.error())
        if self._as_json:
            write_if_room(1, f"{found.as_json()}\n".encode())
        else:
            write_if_room(2, f"stopped: {found.message}\n".encode())
        os._exit(found.exit_code)

    def close(self) -> None:
        """Stop receiving signals: the block ended in time."""
        self._over.set()
        if self._forget is not None:
            self._forget()
        signal.set_wakeup_fd(self._before)
        for end in (self._theirs, self._ours):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _tell(text: str) -> None:
    # Not print: the signal may have interrupted a print, and buffered writers are not reentrant.
    # Only if there is room: a reader that does not read must not keep the process from ending.
    write_if_room(2, f"\n{text}\n".encode())

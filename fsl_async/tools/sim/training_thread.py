"""Threads of which one runs at a time, on a virtual clock.

The scheduler's thread hands the baton to a training thread and waits until it comes back: when the
training thread sleeps, waits for something, or ends. So the order of all calls is that of the
virtual clock, whatever the number of cores. torch's, NumPy's and Python's default random generators
belong to a process; here each training thread has states of its own, as in a process of its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import fsl_transport as tp

STACK_BYTES = 1 << 20
"""Stack of a training thread; memory that is not touched is not used."""


class Killed(BaseException):
    """Unwinds a training thread whose process was killed. User code must not catch it."""


class RandomStates:
    """The states of the default random generators, of which the running thread's are in place."""

    def __init__(self) -> None:
        self._owner: TrainingThread | None = None

    def enter(self, thread: TrainingThread) -> None:
        """Put the thread's states in place, and keep those of the thread before."""
        if self._owner is thread:
            return
        self.leave()
        self._owner = thread
        states = thread.random_states
        if states is None:
            chance = random.Random(thread.seed)  # noqa: S311 - not for secrets
            random.seed(chance.getrandbits(64))
            np.random.seed(chance.getrandbits(32))  # noqa: NPY002 - the generator of user code
            torch.manual_seed(chance.getrandbits(63))
        else:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])

    def leave(self) -> None:
        """Keep the states of the thread that ran last."""
        if self._owner is not None and not self._owner.over:
            state = np.random.get_state()  # noqa: NPY002
            self._owner.random_states = random.getstate(), state, torch.get_rng_state()
        self._owner = None


class TrainingThread:
    """A thread that runs only while the scheduler's thread waits for it.

    work: runs in it. ended: called in the scheduler's thread when `work` has returned or raised.
    states: of its default random generators, which begin with `seed`; None: none are kept.
    entered: called before it goes on.
    """

    def __init__(
        self,
        clock: tp.Scheduler,
        states: RandomStates | None,
        work: Callable[[], None],
        ended: Callable[[BaseException | None], None],
        seed: str,
        *,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        self.seed = seed
        self._entered = entered
        self.random_states: tuple[Any, Any, torch.Tensor] | None = None
        self.over = False
        self.waited_s = 0.0
        """Virtual seconds in `wait`."""
        self._clock = clock
        self._states = states
        self._work = work
        self._ended = ended
        self._error: BaseException | None = None
        self._killed = False
        self._turn = threading.Lock()
        self._back = threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._worked_s = 0.0
        self._since = 0.0
        self._wakes: tp.Cancellable | None = None
        self._thread = threading.Thread(target=self._main, name="training", daemon=True)

    # --- the scheduler's thread ---

    def start(self) -> None:
        """Begin at the present virtual time."""
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)
        self._wakes = self._clock.call_at(self._clock.time(), self._resume)

    def kill(self) -> None:
        """Unwind it: its `finally` blocks run, and nothing that they ask for happens."""
        self._killed = True
        if self._thread.is_alive() and not self.over:
            self._hand_over()
        self._thread.join()

    def _resume(self) -> None:
        self._wakes = None
        if self.over or self._killed:
            return
        self._hand_over()
        if self.over:
            self._ended(self._error)

    def _hand_over(self) -> None:
        if self._states is not None:
            self._states.enter(self)
        self._entered()
        self._since = time.perf_counter()
        self._turn.release()
        self._back.acquire()

    # --- the training thread ---

    @property
    def worked_s(self) -> float:
        """Real seconds for which it has had the baton."""
        return self._worked_s + time.perf_counter() - self._since

    def sleep(self, seconds: float) -> None:
        """Return `seconds` of virtual time later."""
        self._wakes = self._clock.call_at(self._clock.time() + seconds, self._resume)
        self._park()

    def wait(self, deadline: float | None) -> None:
        """Return after `wake`, or at the virtual time `deadline`."""
        if deadline is not None:
            self._wakes = self._clock.call_at(deadline, self._resume)
        self._park()

    def wake(self) -> None:
        """End a `wait` at the present virtual time; in any thread that has the baton."""
        if self._wakes is not None:
            self._wakes.cancel()
        self._wakes = self._clock.call_at(self._clock.time(), self._resume)

    def _park(self) -> None:
        if self._killed:
            raise Killed
        self._worked_s += time.perf_counter() - self._since
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def _main(self) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the scheduler's thread decides
            self._error = error
        self.over = True
        self._back.release()


class Changed:
    """The condition on which a `TrainingThread` waits: `threading.Condition` in virtual time."""

    def __init__(self, clock: tp.Scheduler) -> None:
        self.thread: TrainingThread | None = None
        self._clock = clock
        self._waits = False

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, _: float | None = None) -> bool:
        """Wait for the next `notify_all`, without a limit: all that changes is notified."""
        self._wait(None)
        return True

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Wait until `predicate()` is true, at most `timeout` virtual seconds."""
        deadline = None if timeout is None else self._clock.time() + timeout
        while not (found := predicate()):
            if deadline is not None and self._clock.time() >= deadline:
                break
            self._wait(deadline)
        return found

    def pause(self, deadline: float) -> None:
        """Return at the next `notify_all` or at the virtual time `deadline`: it is no waiting."""
        self._wait(deadline, counts=False)

    def notify_all(self) -> None:
        """Wake the thread if it waits."""
        if self._waits and self.thread is not None:
            self._waits = False
            self.thread.wake()

    def _wait(self, deadline: float | None, *, counts: bool = True) -> None:
        assert self.thread is not None
        begun = self._clock.time()
        self._waits = True
        try:
            self.thread.wait(deadline)
        finally:
            self._waits = False
            if counts:
                self.thread.waited_s += self._clock.time() - begun

"""Training threads on a virtual clock: one at a time, in the order of virtual time."""

import random
import threading

import numpy as np
import pytest
import torch

import fsl_transport as tp
from fsl_async.tools.sim.training_thread import Changed, RandomStates, TrainingThread


@pytest.fixture
def clock():
    return tp.VirtualScheduler()


def _threads(clock, works, ended=lambda _: None):
    """Start a thread for each function, which takes its thread."""
    states, made = RandomStates(), []
    for number, work in enumerate(works):
        thread = TrainingThread(
            clock, states, lambda w=work, n=number: w(made[n]), ended, f"{number}"
        )
        made.append(thread)
    for thread in made:
        thread.start()
    return made


def test_a_wait_ends_with_a_change_or_at_its_deadline(clock):
    """And its virtual time is counted."""
    changed, seen, flag = Changed(clock), [], []

    def work(thread):
        changed.thread = thread
        seen.append((bool(changed.wait_for(lambda: flag, 4.0)), clock.time()))
        seen.append((bool(changed.wait_for(lambda: flag, 60.0)), clock.time()))

    (thread,) = _threads(clock, [work])
    clock.call_at(9.0, lambda: (flag.append(1), changed.notify_all()))
    clock.run_until(100.0)
    assert seen == [(False, 4.0), (True, 9.0)]
    assert thread.waited_s == 9.0


def test_a_killed_thread_is_unwound_and_does_nothing_more(clock):
    """Its `finally` blocks run, also those that sleep again; user code that catches Exception
    cannot keep it.
    """
    seen = []

    def work(thread):
        try:
            while True:
                try:
                    thread.sleep(1.0)
                except Exception:  # noqa: BLE001 - as user code does
                    seen.append("caught")
        finally:
            seen.append("unwound")
            thread.sleep(1.0)

    (thread,) = _threads(clock, [work], ended=seen.append)
    clock.run_until(3.5)
    thread.kill()
    clock.run_until(10.0)
    assert seen == ["unwound"]
    assert thread.over
    assert not [one for one in threading.enumerate() if one.name == "training"]


def test_each_thread_has_default_random_generators_of_its_own(clock):
    """A client draws the same random numbers whatever others draw in between."""

    def draws(seen):
        def work(thread):
            for _ in range(3):
                seen.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
                thread.sleep(1.0)

        return work

    alone, first, second = [], [], []
    _threads(clock, [draws(alone)])
    clock.run_until(10.0)
    _threads(clock, [draws(first), draws(second)])
    clock.run_until(20.0)
    assert first == alone
    assert len(second) == 3
    assert not set(second) & set(first)

"""Stopping: the first request drains, the second stops, and signals work under every loop."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import uvloop

from fsl_async.process.notices import Notice
from fsl_async.process.stopper import Asked, Stopper, StopRequests
from fsl_async.process.stopper import stop_on_signals as ending_on_signals

stop_on_signals = functools.partial(ending_on_signals, ends=False)
"""The process of the tests goes on after the block."""


def test_a_repeated_request_calls_back_once_and_a_hard_one_again():
    """A callback must get one drain and at most one hard stop, in that order."""
    stopper, seen = Stopper(), []
    stopper.subscribe(seen.append)
    assert (stopper.requested, stopper.hard) == (False, False)
    stopper.request(reason="first", exit_code=64)
    stopper.request(reason="second", exit_code=130)
    assert (stopper.requested, stopper.hard) == (True, False)
    stopper.request(hard=True)
    stopper.request()
    stopper.request(hard=True)
    assert seen == [False, True]
    assert (stopper.hard, stopper.reason, stopper.exit_code) == (True, "first", 64)


def test_a_late_subscriber_gets_an_earlier_request():
    """Ctrl-C during start-up comes before the loop subscribes; it must not be lost."""
    stopper, seen = Stopper(), []
    stopper.request(hard=True)
    remove = stopper.subscribe(seen.append)
    assert seen == [True]
    remove()
    remove()
    assert stopper.callbacks == []


def test_requests_from_many_threads_call_each_callback_once():
    """Signals, the supervisor and the loop may request at the same moment."""
    stopper, seen = Stopper(), []
    stopper.subscribe(seen.append)
    threads = [threading.Thread(target=stopper.request) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_signals_reach_a_loop_that_sleeps(new_loop, in_main_thread, capfd):
    """A handler must wake asyncio and uvloop, in the main thread and in another one."""
    stopper, order = Stopper(), []

    async def serve():
        loop, drained, stopped = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def asked(hard):
            loop.call_soon_threadsafe((stopped if hard else drained).set)

        remove = stopper.subscribe(asked)
        loop.call_later(0.02, os.kill, os.getpid(), signal.SIGINT)
        await asyncio.wait_for(drained.wait(), 5)
        order.append("drained")
        loop.call_later(0.02, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stopped.wait(), 5)
        order.append("stopped")
        remove()

    def run():
        loop = new_loop()
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()

    with stop_on_signals(stopper):
        if in_main_thread:
            run()
        else:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert order == ["drained", "stopped"]
    assert stopper.exit_code == 130
    assert capfd.readouterr().err == (
        "\nCtrl-C: finishing in good order; once more stops at once\n\nstopping now\n"
    )


def test_the_third_signal_interrupts_whatever_hangs():
    """A stop that hangs must be interruptible."""
    stopper = Stopper()
    with stop_on_signals(stopper, quiet=True):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stopper.hard


_STUBBORN = {
    "sleeps": "time.sleep(60)",
    "catches everything": """
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass""",
    "is in a call that runs no Python": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', "
    "2**31 - 1)",
}


@pytest.mark.parametrize("how", list(_STUBBORN))
@pytest.mark.parametrize("as_json", [False, True])
def test_twice_ends_code_of_others_at_once(how, as_json):
    """A second Ctrl-C must not wait for the end of a training step."""
    code = (
        "import time, sys; from fsl_async.process.stopper import Stopper, stop_on_signals\n"
        f"with stop_on_signals(Stopper(), at_once=True, as_json={as_json}):\n"
        "    print('here', flush=True)\n" + textwrap.indent(_STUBBORN[how], "    ")
    )
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert time.monotonic() - begun < 5.0
    if how == "sleeps" and process.returncode != 130:
        # Nothing stood in the way of KeyboardInterrupt, which `main` translates; on a slow machine
        # the process is ended before it is out.
        assert err.rstrip().endswith("KeyboardInterrupt")
        return
    assert process.returncode == 130
    assert "stopping now" in err
    shown = '{"error": "Ctrl-C", "kind": "InterruptedByUserError", "exit_code": 130}'
    assert shown in out if as_json else "stopped: Ctrl-C\n" in err


@pytest.mark.parametrize(
    ("attended", "signals", "last"),
    [
        (False, [("SIGTERM", 0.0), ("SIGTERM", 0.01)], Asked.SAME),
        (False, [("SIGTERM", 0.0), ("SIGTERM", 0.01), ("SIGTERM", 2.0)], Asked.SAME),
        (False, [("SIGTERM", 0.0), ("SIGTERM", 2.1)], Asked.AT_ONCE),
        (False, [("SIGTERM", 0.0), ("SIGTERM", 1.5), ("SIGTERM", 3.0)], Asked.AT_ONCE),
        (False, [("SIGINT", 0.0), ("SIGINT", 0.2)], Asked.AT_ONCE),
        (False, [("SIGINT", 0.0), ("SIGTERM", 0.2)], Asked.AT_ONCE),
        (False, [("SIGTERM", 0.0), ("SIGINT", 0.2)], Asked.AT_ONCE),
        (True, [("SIGTERM", 0.0), ("SIGTERM", 0.01)], Asked.AT_ONCE),
        (True, [("SIGINT", 0.0), ("SIGINT", 0.01)], Asked.AT_ONCE),
    ],
)
def test_a_copy_of_sigterm_is_the_same_request(attended, signals, last):
    """Slurm signals the complete job, and its batch script forwards a copy; a person sends none."""
    requests = StopRequests(attended=attended)
    answers = [requests.ask(name, 100.0 + at) for name, at in signals]
    assert answers[0] is Asked.END
    assert answers[-1] is last


def test_sigterm_twice_at_once_does_not_end_a_process_in_the_middle():
    """It has two seconds of work left and finishes it; a later SIGTERM still stops it at once."""
    code = (
        "import time; from fsl_async.process.stopper import Stopper, stop_on_signals\n"
        "stopper = Stopper()\n"
        "with stop_on_signals(stopper, at_once=True):\n"
        "    print('here', flush=True)\n"
        "    while not stopper.requested: time.sleep(0.01)\n"
        "    time.sleep(1.2)\n"
        "    print('finished', stopper.hard, flush=True)\n"
        "    time.sleep(60)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code],
        text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "finished False\n"
        time.sleep(1.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) != 0


def test_usr2_warns_and_the_term_that_follows_is_the_first_signal(monkeypatch):
    """Slurm sends USR2, then TERM: neither may cut off the goodbye."""
    monkeypatch.setattr("fsl_async.process.stopper.is_attended", lambda: True)
    stopper, seen = Stopper(), []
    stopper.subscribe(seen.append)
    notices = {"SIGUSR2": Notice("SIGUSR2", 120.0), "SIGTERM": Notice("SIGTERM", 30.0)}
    before = signal.getsignal(signal.SIGUSR2)
    with stop_on_signals(stopper, quiet=True, notices=notices.__getitem__):
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
        assert seen == [False]
        assert (stopper.reason, stopper.exit_code) == ("SIGUSR2", 64)
        assert 115.0 < stopper.deadline - time.monotonic() <= 120.0
        signal.raise_signal(signal.SIGTERM)
        assert (seen, stopper.hard) == ([False, False], False)
        assert stopper.deadline - time.monotonic() <= 30.0
        signal.raise_signal(signal.SIGUSR2)
        assert not stopper.hard
        signal.raise_signal(signal.SIGTERM)
        assert stopper.hard
    assert signal.getsignal(signal.SIGUSR2) is before


def test_sigterms_until_the_very_end_leave_the_exit_code():
    """Python's shutdown takes tenths of a second, in which its own handlers are already gone."""
    code = (
        "import sys, threading, time; from fsl_async.process.stopper import Stopper,"
        " stop_on_signals\n"
        "stopper = Stopper()\n"
        "with stop_on_signals(stopper, quiet=True):\n"
        "    print('here', flush=True)\n"
        "    while not stopper.requested: time.sleep(0.01)\n"
        "threading.Thread(target=time.sleep, args=(0.05,)).start()\n"
        "sys.exit(stopper.exit_code)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(20)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == b"here\n"
    while any(process.poll() is None for process in processes):
        for process in processes:
            process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    ends = [(process.returncode, *process.communicate()) for process in processes]
    assert ends == [(64, b"", b"")] * 20


def in_a_worker(number):
    """Fork a worker, which gets a signal; return how it ended."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_workers_take_their_own_signals(monkeypatch):
    """A pool ends its workers by SIGTERM; Ctrl-C reaches all, and the node may need its workers."""
    monkeypatch.setattr("fsl_async.process.stopper.is_attended", lambda: True)
    stopper, seen = Stopper(), []
    stopper.subscribe(seen.append)
    with stop_on_signals(stopper, quiet=True, at_once=True):
        ends = [in_a_worker(number) for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)]
        time.sleep(0.1)
    assert ends == [-signal.SIGTERM, -signal.SIGTERM, 7]
    assert seen == []

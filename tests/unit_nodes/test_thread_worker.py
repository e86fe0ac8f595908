"""The worker beside a loop: every result, in order, on the loop, few wake-ups."""

import asyncio
import threading

import pytest

from fsl_async.nodes.runtime import ThreadWorker


def run(play):
    """Play with a worker on a new loop; return what the loop was told of exceptions."""
    told = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        worker = ThreadWorker(loop, "store")
        try:
            await asyncio.wait_for(play(worker), 30.0)
        finally:
            worker.close()

    asyncio.run(main())
    return told


def test_results_come_in_order_on_the_loop():
    """Thousands of them, errors between them."""
    found, threads = [], set()

    async def play(worker):
        over = asyncio.Event()

        def done(value):
            threads.add(threading.current_thread())
            found.append(value)
            if value == 4999:
                over.set()

        def job(number):
            if number % 7 == 3:
                raise ValueError(number)
            return number

        for number in range(5000):
            worker.submit(
                lambda number=number: job(number), done, lambda error: done(error.args[0])
            )
            if number % 100 == 0:
                await asyncio.sleep(0)
        await over.wait()

    run(play)
    assert found == list(range(5000))
    assert threads == {threading.main_thread()}


def test_a_callback_that_fails_does_not_take_others_along():
    """The loop reports it; later results still come."""
    found = []

    async def play(worker):
        over = asyncio.Event()

        def done(number):
            if number == 1:
                raise RuntimeError("a defect")
            found.append(number)
            if number == 99:
                over.set()

        for number in range(100):
            worker.submit(lambda number=number: number, done, pytest.fail)
        await over.wait()

    (told,) = run(play)
    assert str(told) == "a defect"
    assert found == [number for number in range(100) if number != 1]


def test_a_job_that_exits_is_reported_and_later_ones_run():
    """A native library's panic is no `Exception`."""
    found = []

    async def play(worker):
        over = asyncio.Event()

        def exits():
            raise SystemExit(3)

        worker.submit(exits, pytest.fail, lambda error: found.append(str(error)))
        worker.submit(lambda: found.append("next"), lambda _: over.set(), pytest.fail)
        await over.wait()

    run(play)
    assert sorted(found) == ["a job ended with SystemExit(3)", "next"]


def test_other_work_of_the_loop_comes_between_many_results():
    """A burst of results must not hold the loop for long."""
    found, seen = [], []

    async def play(worker):
        ready = threading.Event()
        for number in range(200):
            worker.submit(lambda number=number: number, found.append, pytest.fail)
        worker.submit(ready.set, lambda _: None, pytest.fail)
        ready.wait(30.0)  # all results wait now
        while len(found) < 200:
            seen.append(len(found))
            await asyncio.sleep(0)

    run(play)
    assert len(seen) >= 10
    assert found == list(range(200))


def test_a_closed_worker_drops_what_it_has_not_begun():
    """Its running job ends first; no result is delivered any more."""
    gate, ran, found = threading.Event(), [], []

    async def play(worker):
        begun = threading.Event()

        def first():
            begun.set()
            gate.wait(30.0)
            ran.append(1)

        worker.submit(first, found.append, pytest.fail)
        worker.submit(lambda: ran.append(2), found.append, pytest.fail)
        begun.wait(30.0)
        threading.Timer(0.05, gate.set).start()
        worker.close()
        worker.submit(lambda: ran.append(3), found.append, pytest.fail)
        await asyncio.sleep(0.05)

    run(play)
    assert ran == [1]
    assert found == []

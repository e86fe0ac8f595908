"""Chunks in several threads: ordered results, bounded memory, no running job after an error."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from fsl_async.store.chunk_pool import ChunkPool
from fsl_async.store.errors import NoWorkerThread


@pytest.fixture(params=[1, 3])
def pool(request):
    pool = ChunkPool(request.param)
    yield pool
    pool.close()


def test_results_are_in_the_order_of_the_chunks(pool):
    """A digest over the results must not depend on which thread was faster."""

    def job(number):
        time.sleep(0.002 * (number % 3))
        return number * number

    assert list(pool.each(job, range(40))) == [number * number for number in range(40)]


def test_only_a_few_chunks_are_taken_ahead(pool):
    """The frames of a delta come from a file as large as the model."""
    taken = []
    results = pool.each(lambda number: number, (taken.append(n) or n for n in range(1000)))
    assert next(results) == 0
    assert len(taken) <= 2 * pool.threads
    results.close()


def test_no_job_runs_after_an_error(pool):
    """The caller then clears the accumulator; a late addition would stay in it."""
    at_work, lock = [], threading.Lock()

    def job(number):
        with lock:
            at_work.append(number)
        time.sleep(0.02)
        with lock:
            at_work.remove(number)
        if number == 2:
            raise ValueError("chunk 2")

    with pytest.raises(ValueError, match="chunk 2"):
        pool.run(job, range(100))
    assert at_work == []


def test_several_threads_run_at_the_same_time():
    """Two jobs that wait for each other end only if both run."""
    pool, both = ChunkPool(2), threading.Barrier(2, timeout=10)
    pool.run(lambda _: both.wait(), range(4))
    pool.close()


def test_begun_jobs_have_ended_after_the_wait(pool):
    """An error is raised after the other jobs have ended: their files are closed next."""
    done = []

    def slowly():
        time.sleep(0.05)
        done.append("slowly")

    def fail():
        raise OSError("the disk is full")

    def begin_and_wait():
        pool.begin([slowly, fail, slowly])()

    with pytest.raises(OSError, match="the disk is full"):
        begin_and_wait()
    assert done == ["slowly"] * (2 if pool.threads > 1 else 1)
    pool.begin([slowly])()
    pool.begin([])()
    assert len(done) == (3 if pool.threads > 1 else 2)


def test_begin_does_not_wait():
    """Otherwise the next chunk waits for the disk."""
    pool, go_on, results = ChunkPool(2), threading.Event(), []
    wait = pool.begin([lambda: results.append(go_on.wait(20))])
    go_on.set()
    wait()
    pool.close()
    assert results == [True]


def begin_and_wait(pool, job):
    """Run the job six times."""
    pool.begin([job] * 6)()


def run_for_each(pool, job):
    """Run the job six times."""
    pool.run(lambda _: job(), range(6))


@pytest.mark.parametrize("do", [begin_and_wait, run_for_each])
def test_no_job_runs_after_a_thread_cannot_be_started(monkeypatch, do):
    """No job runs after NoWorkerThread.

    The executor keeps the job for which it could not start a thread; another thread would run it
    later, on closed files.
    """
    pool, at_work, done = ChunkPool(3), [], []

    def job():
        at_work.append(0)
        time.sleep(0.05)
        at_work.pop()
        done.append(0)

    begin, allowed = threading.Thread.start, [True, False]

    def start(thread):
        if not allowed or not allowed.pop(0):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(NoWorkerThread, match="can't start new thread"):
        do(pool, job)
    assert not at_work
    count = len(done)
    time.sleep(0.2)
    assert len(done) == count
    monkeypatch.undo()
    do(pool, job)
    assert len(done) == count + 6
    pool.close()


def test_closing_a_pool_ends_every_wait():
    """Queued jobs are cancelled."""
    pool, go_on, results = ChunkPool(2), threading.Event(), []
    wait = pool.begin([lambda: go_on.wait(20)] * 4)

    def wait_and_record():
        try:
            wait()
        except CancelledError as error:
            results.append(error)

    executor = pool._pool
    threads = [threading.Thread(target=one, daemon=True) for one in (pool.close, wait_and_record)]
    for thread in threads:
        thread.start()
    # Queued jobs are cancelled once the queue holds nothing but the executor's end marker.
    while not (executor._shutdown and executor._work_queue.qsize() <= 1):
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(results) == 1


def test_a_closed_pool_can_be_used_again():
    """A store is closed and opened again."""
    pool = ChunkPool(2)
    for _ in range(2):
        assert list(pool.each(abs, [-1, -2, -3])) == [1, 2, 3]
        pool.close()

"""Chunks in several threads: ordered results, bounded memory, no running job after an error."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from fsl_async.store.disk.chunk_pool import ChunkPool


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

"""Chunks in several threads: results in order, bounded memory, and nobody at work after an error."""

import threading
import time

import pytest

from fsl_async.learn.chunk_pool import ChunkPool


@pytest.fixture(params=[1, 3])
def pool(request):
    pool = ChunkPool(request.param)
    yield pool
    pool.close()


def test_results_come_in_the_order_of_the_chunks(pool):
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


def test_after_an_error_nobody_works_any_more(pool):
    """The caller clears the accumulator then; a late addition would stay in it."""
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


def test_several_threads_work_at_the_same_time():
    """What the pool is for; two jobs that wait for each other end only when both run."""
    pool, both = ChunkPool(2), threading.Barrier(2, timeout=10)
    pool.run(lambda _: both.wait(), range(4))
    pool.close()


def test_begun_jobs_have_ended_when_the_wait_is_over(pool):
    """One that fails is told only when the others are done, for they write to files that are closed then."""
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


def test_whoever_began_jobs_works_meanwhile():
    """Else the next chunk waits for the disk."""
    pool, go_on, told = ChunkPool(2), threading.Event(), []
    wait = pool.begin([lambda: told.append(go_on.wait(5))])
    go_on.set()
    wait()
    pool.close()
    assert told == [True]

"""A thread pool for independent chunks: codec, disk calls and hashing release the GIL."""

from __future__ import annotations

from collections import deque
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from fsl_async.store.errors import NoWorkerThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 2
"""Chunks in progress per thread: one being processed and one queued."""


class ChunkPool:
    """Runs one job per chunk on `threads` threads; with one thread, in the caller's thread."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def each(self, job: Callable[[A], B], chunks: Iterable[A]) -> Iterator[B]:
        """Yield job(chunk) in order, taking a few chunks at a time from `chunks`.

        When a job raises, or the caller stops iterating, the started jobs end first: afterwards no
        thread touches anything.
        """
        if self.threads <= 1:
            yield from map(job, chunks)
            return
        under_way: deque[Future[B]] = deque()
        try:
            for chunk in chunks:
                under_way.append(self._submit(job, chunk))
                if len(under_way) >= _AHEAD * self.threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                if not future.cancel():
                    future.exception()  # waits

    def run(self, job: Callable[[A], object], chunks: Iterable[A]) -> None:
        """Call `each` for jobs that return nothing."""
        for _ in self.each(job, chunks):
            pass

    def begin(self, jobs: Sequence[Callable[[], object]]) -> Callable[[], None]:
        """Start the jobs; return a function that waits for all of them.

        That function raises the error of the first failed job, in the order of `jobs`. With one
        thread the jobs run before this returns; the first error ends it.
        """
        if self.threads <= 1:
            for job in jobs:
                job()
            return lambda: None
        under_way = [self._submit(job) for job in jobs]

        def wait() -> None:
            errors = [error for error in map(_error_of, under_way) if error is not None]
            if errors:
                raise errors[0]

        return wait

    def _submit(self, job: Callable[..., B], *arguments: object) -> Future[B]:
        """Queue a job. NoWorkerThread: the system cannot start a thread.

        After any error no job is running any more, and queued jobs never start.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="chunks")
        try:
            return self._pool.submit(job, *arguments)
        except BaseException as error:
            # The job is queued all the same, and others may be using files that the caller is about
            # to close.
            self.close()
            if isinstance(error, RuntimeError):
                raise NoWorkerThread(str(error)) from error
            raise

    def close(self) -> None:
        """Stop the threads; never call it from one of them.

        Queued jobs are cancelled; a call that waits for one gets CancelledError.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _error_of(ended: Future[Any]) -> BaseException | None:
    """Wait for a job and return what it raised, or CancelledError if the pool was closed first."""
    try:
        return ended.exception()
    except futures.CancelledError as error:
        return error

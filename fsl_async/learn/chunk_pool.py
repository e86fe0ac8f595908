"""A small pool of threads for coding chunks: they are independent, and the native codec lets go of the interpreter while it works."""

from __future__ import annotations

from collections import deque
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 2
"""Chunks under way for each thread: one that is worked on and one that waits."""


class ChunkPool:
    """Runs one job for each chunk, `threads` at a time; with one thread, in the caller's."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def each(self, job: Callable[[A], B], chunks: Iterable[A]) -> Iterator[B]:
        """The results of job(chunk), in order; a few chunks at a time are taken from `chunks`.

        When a job raises, or the caller stops asking, the jobs that have begun end first: after that no thread touches anything.
        """
        if self.threads <= 1:
            yield from map(job, chunks)
            return
        pool = self._started()
        under_way: deque[Future[B]] = deque()
        try:
            for chunk in chunks:
                under_way.append(pool.submit(job, chunk))
                if len(under_way) >= _AHEAD * self.threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                if not future.cancel():
                    future.exception()  # waits

    def run(self, job: Callable[[A], object], chunks: Iterable[A]) -> None:
        """`each`, for jobs that return nothing."""
        for _ in self.each(job, chunks):
            pass

    def begin(self, jobs: Sequence[Callable[[], object]]) -> Callable[[], None]:
        """Start the jobs; the call that is returned waits for all of them, and raises what the first of those that failed raised.

        With one thread they are done, in their order and up to the first that fails, when this returns or raises.
        """
        if self.threads <= 1:
            for job in jobs:
                job()
            return lambda: None
        pool = self._started()
        under_way = [pool.submit(job) for job in jobs]

        def wait() -> None:
            futures.wait(under_way)
            for future in under_way:
                future.result()

        return wait

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="codec")
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

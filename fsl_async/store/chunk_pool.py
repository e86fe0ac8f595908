"""A small pool of threads for work on chunks, which are independent: the native codec, the disk and
hashing let go of the interpreter.
"""

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
"""Chunks under way for each thread: one that is worked on and one that waits."""


class ChunkPool:
    """Runs one job for each chunk, `threads` at a time; with one thread, in the caller's."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def each(self, job: Callable[[A], B], chunks: Iterable[A]) -> Iterator[B]:
        """The results of job(chunk), in order; a few chunks at a time are taken from `chunks`.

        When a job raises, or the caller stops asking, the jobs that have begun end first: after
        that no thread touches anything.
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
        """`each`, for jobs that return nothing."""
        for _ in self.each(job, chunks):
            pass

    def begin(self, jobs: Sequence[Callable[[], object]]) -> Callable[[], None]:
        """Start the jobs; the call that is returned waits for all of them, and raises what the
        first in their order that failed raised.

        With one thread they are done, in their order and up to the first that fails, when this
        returns or raises.
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
        """NoWorkerThread where none can be started. After any error nobody is at work any more, and
        what had not begun never will.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="chunks")
        try:
            return self._pool.submit(job, *arguments)
        except BaseException as error:
            # The job is in the queue all the same, and others may be at work on what the caller is
            # about to close.
            self.close()
            if isinstance(error, RuntimeError):
                raise NoWorkerThread(str(error)) from error
            raise

    def close(self) -> None:
        """End the threads; not from one of them. Jobs that have not begun are cancelled, and who
        waits for them gets CancelledError.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _error_of(ended: Future[Any]) -> BaseException | None:
    """What a job raised, once it has ended; CancelledError where the pool was closed before it
    began.
    """
    try:
        return ended.exception()
    except futures.CancelledError as error:
        return error

"""What a parameter server receives: version 0 and deltas, chunk by chunk into its store, by its one worker."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.accounting.categories import Direction
from fsl_async.nodes.runtime import Worker
from fsl_async.roles.machine import StreamLost
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.store.records import SpoolResult

if TYPE_CHECKING:
    from fsl_async.nodes.ps.shell import ParameterServerShell


class Sink:
    """Hands the chunks of one stream to the worker."""

    def __init__(
        self,
        worker: Worker,
        write: Callable[[int, bytes], None],
        problem: Callable[[str], None],
        count: Callable[[int, bytes], None],
    ) -> None:
        self._worker = worker
        self._write = write
        self._problem = problem
        self._count = count

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Have the worker write a chunk."""

        def failed(error: Exception) -> None:
            self._problem(str(error))
            done(False)

        def written(_: None) -> None:
            self._count(index, frame)
            done(True)

        frame = bytes(data)
        self._worker.submit(lambda: self._write(index, frame), written, failed)


class Receiving:
    """The streams that come, of all clients."""

    def __init__(self, shell: ParameterServerShell) -> None:
        self._shell = shell
        self._incoming: dict[tuple[str, str], Callable[[], None]] = {}
        self._problems: dict[tuple[str, str], str] = {}
        self.storing: Counter[str] = Counter()
        """Deltas of each client that are whole, but not known to be stored."""

    def received(self, peer: str, stream: str) -> None:
        """All chunks of a stream are written."""
        finish = self._incoming.pop((peer, stream), None)
        if finish is not None:
            finish()

    def failed(self, peer: str, stream: str, reason: str) -> None:
        """A stream will not be whole."""
        problem = self._problems.pop((peer, stream), reason)
        if self._incoming.pop((peer, stream), None) is not None:
            self._shell.node.feed(StreamLost(peer, stream, problem))

    def left(self, peer: str) -> None:
        """The session of a client is over, and its streams with it."""
        for stream in {*self._incoming, *self._problems}:
            if stream[0] == peer:
                self._incoming.pop(stream, None)
                self._problems.pop(stream, None)

    def initial(self, effect: do.ReceiveInitial, number: int) -> None:
        """Receive the weights that are to be version 0."""
        shell, manifest = self._shell, self._shell.manifest
        assert manifest is not None
        peer, stream = effect.peer, effect.stream

        def ready(_: None) -> None:
            self._open(peer, stream, shell.store.write_initial, finish)

        def finish() -> None:
            shell.worker.submit(
                shell.store.finish_initial,
                lambda made: shell.jobs.committed(made, started, number),
                lambda error: shell.node.feed(ev.CommitFailed(0, str(error)), number),
            )

        def failed(error: Exception) -> None:
            shell.endpoint.decline(peer, stream, "server cannot write")
            shell.node.feed(ev.CommitFailed(0, str(error)), number)

        started = shell.scheduler.time()
        shell.worker.submit(lambda: shell.store.begin_initial(manifest), ready, failed)

    def delta(self, effect: do.ReceiveDelta, number: int) -> None:
        """Receive a delta into the spool, from the chunk on that is not there yet."""
        shell, delta, peer, stream = self._shell, effect.delta, effect.peer, effect.stream
        key = delta.key

        def begin() -> int | None:
            known = shell.store.spool_begin(delta, effect.weight)
            return None if known else shell.store.spool_next_chunk(key)

        def begun(next_chunk: int | None) -> None:
            if next_chunk is None:
                # Finished between this offer and now; the acknowledgement is on its way.
                shell.endpoint.decline(peer, stream, "known")
                return
            write = lambda index, frame: shell.store.spool_write(key, index, frame)  # noqa: E731
            self._open(peer, stream, write, finish, next_chunk)

        def finish() -> None:
            self.storing[peer] += 1
            shell.worker.submit(lambda: shell.store.spool_finish(key), stored, not_stored)

        def over() -> None:
            self.storing[peer] -= 1
            self.storing += Counter()  # forgets whoever has none

        def not_stored(error: Exception) -> None:
            over()
            broken(error)

        def stored(result: SpoolResult) -> None:
            over()
            shell.node.feed(ev.DeltaStored(peer, result.stored, result.problem), number)

        def broken(error: Exception) -> None:
            shell.endpoint.decline(peer, stream, "server cannot store it now")
            shell.endpoint.cancel(peer, stream, "server cannot store it now")
            shell.node.feed(StreamLost(peer, stream, str(error)), number)

        shell.worker.submit(begin, begun, broken)

    def _open(
        self,
        peer: str,
        stream: str,
        write: Callable[[int, bytes], None],
        finish: Callable[[], None],
        next_chunk: int = 0,
    ) -> None:
        def problem(text: str) -> None:
            self._problems[(peer, stream)] = text

        self._incoming[(peer, stream)] = finish
        # LocalError: offered twice, and the first is being received already.
        with contextlib.suppress(tp.LocalError):
            sink = Sink(self._shell.worker, write, problem, self._shell.counting(Direction.UP))
            self._shell.endpoint.accept(peer, stream, sink, next_chunk)

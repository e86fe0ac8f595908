"""Receives version 0 and deltas into the parameter server's store, chunk by chunk in the worker."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable

from attrs import define, field

import fsl_transport as tp
from fsl_async.nodes.runtime import Worker
from fsl_async.roles.machine import Event, StreamLost
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.manifest import Manifest
from fsl_async.store.records import Committed, SpoolResult
from fsl_async.store.store import Store

CANNOT_STORE = "parameter server cannot store it now"


class Sink:
    """Passes the chunks of one stream to the worker."""

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
        """Write a chunk in the worker."""

        def failed(error: Exception) -> None:
            self._problem(str(error))
            done(False)

        def written(_: None) -> None:
            self._count(index, frame)
            done(True)

        frame = bytes(data)
        self._worker.submit(lambda: self._write(index, frame), written, failed)


@define(kw_only=True, eq=False)
class Receiving:
    """The streams of all clients to the parameter server."""

    store: Store
    worker: Worker
    endpoint: tp.ListenerEndpoint
    scheduler: tp.Scheduler
    feed: Callable[[Event, int | None], None]
    manifest: Callable[[], Manifest]
    """Returns the run's manifest, once a client has attached a model."""
    committed: Callable[[Committed, float, int], None]
    """Takes version 0, the time at which it was begun, and the number of its effect."""
    count: Callable[[int, bytes], None]
    """Takes each chunk that is written."""
    storing: Counter[str] = field(factory=Counter, init=False)
    """Client -> its deltas that have arrived and are being stored."""
    _incoming: dict[tuple[str, str], Callable[[], None]] = field(factory=dict, init=False)
    _problems: dict[tuple[str, str], str] = field(factory=dict, init=False)
    _measured: dict[str, tuple[str, bytes]] = field(factory=dict, init=False)
    """Client -> the name that a stream of its last scalars would have, and their frame."""
    _finishing: set[DeltaKey] = field(factory=set, init=False)
    """Deltas of which every frame is here. They will be accepted, so no new offer is judged."""

    def finishes(self, key: DeltaKey) -> bool:
        """Whether a delta is here that is not stored yet; the answer is sent then."""
        return key in self._finishing

    def measured(self, peer: str, stream: str, frame: bytes) -> None:
        """Keep the frame of a delta of scalars until it is received or declined."""
        self._measured[peer] = stream, frame

    def declined(self, peer: str, stream: str) -> bool:
        """Drop a delta of scalars; False: it is a stream."""
        found = self._measured.get(peer, ("", b""))[0] == stream
        if found:
            del self._measured[peer]
        return found

    def received(self, peer: str, stream: str) -> None:
        """Finish a stream whose chunks are all written."""
        finish = self._incoming.pop((peer, stream), None)
        if finish is not None:
            finish()

    def failed(self, peer: str, stream: str, reason: str) -> None:
        """Report a stream that ended incomplete."""
        problem = self._problems.pop((peer, stream), reason)
        if self._incoming.pop((peer, stream), None) is not None:
            self.feed(StreamLost(peer, stream, problem), None)

    def left(self, peer: str) -> None:
        """Forget the streams of a session that is over."""
        self._measured.pop(peer, None)
        for stream in {*self._incoming, *self._problems}:
            if stream[0] == peer:
                self._incoming.pop(stream, None)
                self._problems.pop(stream, None)

    def initial(self, effect: do.ReceiveInitial, number: int) -> None:
        """Receive the weights of version 0."""
        manifest, peer, stream = self.manifest(), effect.peer, effect.stream
        begun_at = self.scheduler.time()

        def ready(_: None) -> None:
            self._open(peer, stream, self.store.write_initial, finish)

        def finish() -> None:
            self.feed(ev.InitialReceived(peer), number)
            self.worker.submit(
                self.store.finish_initial,
                lambda made: self.committed(made, begun_at, number),
                lambda error: self.feed(ev.CommitFailed(0, str(error)), number),
            )

        def failed(error: Exception) -> None:
            self.endpoint.decline(peer, stream, "parameter server cannot write")
            self.feed(ev.CommitFailed(0, str(error)), number)

        self.worker.submit(lambda: self.store.begin_initial(manifest), ready, failed)

    def delta(self, effect: do.ReceiveDelta, number: int) -> None:
        """Receive a delta into the spool, from the first missing chunk."""
        delta, peer, stream = effect.delta, effect.peer, effect.stream
        key = delta.key
        if self._measured.get(peer, ("", b""))[0] == stream:
            self._store_measured(effect, self._measured.pop(peer)[1], number)
            return

        def begin() -> int | None:
            known = self.store.spool_begin(delta, effect.weight)
            return None if known else self.store.spool_next_chunk(key)

        def begun(next_chunk: int | None) -> None:
            if next_chunk is None:
                # It was finished since this offer; the acknowledgement is being sent.
                self.endpoint.decline(peer, stream, "known")
                return
            write = lambda index, frame: self.store.spool_write(key, index, frame)  # noqa: E731
            finish = lambda: self._finish_delta(effect, number, broken)  # noqa: E731
            self._open(peer, stream, write, finish, next_chunk)

        def broken(error: Exception) -> None:
            self.endpoint.decline(peer, stream, CANNOT_STORE)
            self.endpoint.cancel(peer, stream, CANNOT_STORE)
            self.feed(StreamLost(peer, stream, str(error)), number)

        self.worker.submit(begin, begun, broken)

    def _store_measured(self, effect: do.ReceiveDelta, frame: bytes, number: int) -> None:
        key = effect.delta.key
        self._finishing.add(key)

        def write() -> bool:
            is_new = self.store.spool_begin(effect.delta, effect.weight) is None
            if is_new:
                self.store.spool_write(key, 0, frame)
            return is_new

        def written(is_new: bool) -> None:
            if is_new:
                self.count(0, frame)
                self._finish_delta(effect, number, broken)
            else:  # the acknowledgement is being sent
                self._finishing.discard(key)

        def broken(error: Exception) -> None:
            self._finishing.discard(key)
            self.feed(StreamLost(effect.peer, effect.stream, str(error)), number)

        self.worker.submit(write, written, broken)

    def _finish_delta(
        self, effect: do.ReceiveDelta, number: int, broken: Callable[[Exception], None]
    ) -> None:
        """Make a delta durable whose frames are all written."""
        peer, key = effect.peer, effect.delta.key
        self.storing[peer] += 1
        self._finishing.add(key)

        def over() -> None:
            self._finishing.discard(key)
            self.storing[peer] -= 1
            self.storing += Counter()  # drops the clients that have none

        def not_stored(error: Exception) -> None:
            over()
            broken(error)

        def stored(result: SpoolResult) -> None:
            over()
            self.feed(ev.DeltaStored(peer, result.stored, result.problem), number)

        self.worker.submit(lambda: self.store.spool_finish(key), stored, not_stored)

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
        # LocalError: it was offered twice, and the first one is being received.
        with contextlib.suppress(tp.LocalError):
            sink = Sink(self.worker, write, problem, self.count)
            self.endpoint.accept(peer, stream, sink, next_chunk)

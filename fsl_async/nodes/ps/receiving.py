"""Receives version 0 and deltas into the parameter server's store, chunk by chunk in the worker."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.nodes.wire import Sink
from fsl_async.roles.machine import Done, StreamLost
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.delta import DeltaKey

if TYPE_CHECKING:
    from fsl_async.nodes.ps.store_jobs import ParameterServerContext

CANNOT_STORE = "parameter server cannot store it now"


@define(eq=False)
class Receiving:
    """The streams of all clients to the parameter server."""

    ps: ParameterServerContext
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
            self.ps.node.feed(StreamLost(peer, stream, problem), None)

    def left(self, peer: str) -> None:
        """Forget the streams of a session that is over."""
        self._measured.pop(peer, None)
        for stream in {*self._incoming, *self._problems}:
            if stream[0] == peer:
                self._incoming.pop(stream, None)
                self._problems.pop(stream, None)

    def initial(self, effect: do.ReceiveInitial, number: int) -> None:
        """Receive the weights of version 0."""
        manifest, peer, stream = self.ps.known_manifest(), effect.peer, effect.stream
        begun_at = self.ps.scheduler.time()

        def ready(_: None) -> None:
            self._open(peer, stream, self.ps.store.write_initial, finish)

        def finish() -> None:
            self.ps.node.feed(Done(effect), number)
            self.ps.worker.submit(
                self.ps.store.finish_initial,
                lambda made: self.ps.jobs.committed(made, begun_at, number),
                lambda error: self.ps.node.feed(Done.failed(effect, error), number),
            )

        def failed(error: Exception) -> None:
            self.ps.endpoint.decline(peer, stream, "parameter server cannot write")
            self.ps.node.feed(Done.failed(effect, error), number)

        self.ps.worker.submit(lambda: self.ps.store.begin_initial(manifest), ready, failed)

    def delta(self, effect: do.ReceiveDelta, number: int) -> None:
        """Receive a delta into the spool, from the first missing chunk."""
        delta, peer, stream = effect.delta, effect.peer, effect.stream
        key = delta.key
        if self._measured.get(peer, ("", b""))[0] == stream:
            self._store_measured(effect, self._measured.pop(peer)[1], number)
            return

        def begin() -> int | None:
            known = self.ps.store.spool_begin(delta)
            return None if known else self.ps.store.spool_next_chunk(key)

        def begun(next_chunk: int | None) -> None:
            if next_chunk is None:
                # It was finished since this offer; the acknowledgement is being sent.
                self.ps.endpoint.decline(peer, stream, "known")
                return
            write = partial(self.ps.store.spool_write, key)
            finish = lambda: self._finish_delta(effect, number, broken)  # noqa: E731
            self._open(peer, stream, write, finish, next_chunk)

        def broken(error: Exception) -> None:
            self.ps.endpoint.decline(peer, stream, CANNOT_STORE)
            self.ps.endpoint.cancel(peer, stream, CANNOT_STORE)
            self.ps.node.feed(StreamLost(peer, stream, str(error)), number)

        self.ps.worker.submit(begin, begun, broken)

    def _store_measured(self, effect: do.ReceiveDelta, frame: bytes, number: int) -> None:
        key = effect.delta.key
        self._finishing.add(key)

        def write() -> bool:
            is_new = self.ps.store.spool_begin(effect.delta) is None
            if is_new:
                self.ps.store.spool_write(key, 0, frame)
            return is_new

        def written(is_new: bool) -> None:
            if is_new:
                self._count(0, frame)
                self._finish_delta(effect, number, broken)
            else:  # the acknowledgement is being sent
                self._finishing.discard(key)

        def broken(error: Exception) -> None:
            self._finishing.discard(key)
            self.ps.node.feed(StreamLost(effect.peer, effect.stream, str(error)), number)

        self.ps.worker.submit(write, written, broken)

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

        def stored(result: ev.DeltaStored) -> None:
            over()
            self.ps.node.feed(result, number)

        self.ps.worker.submit(lambda: self.ps.store.spool_finish(key), stored, not_stored)

    def _open(
        self,
        peer: str,
        stream: str,
        write: Callable[..., None],
        finish: Callable[[], None],
        next_chunk: int = 0,
    ) -> None:
        def problem(text: str) -> None:
            self._problems[(peer, stream)] = text

        self._incoming[(peer, stream)] = finish
        # LocalError: it was offered twice, and the first one is being received.
        with contextlib.suppress(tp.LocalError):
            sink = Sink(self.ps.worker, write, self._count, problem)
            self.ps.endpoint.accept(peer, stream, sink, next_chunk)

    def _count(self, index: int, frame: bytes) -> None:
        self.ps.count(Direction.UP, index, frame)

"""Sends versions and updates, read from the parameter server's store by its worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from fsl_async.accounting.sizes import Direction
from fsl_async.nodes.wire import Source, eager_bytes
from fsl_async.roles.machine import Note
from fsl_async.roles.messages import MAX_BYTES
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg

if TYPE_CHECKING:
    from fsl_async.nodes.ps.store_jobs import ParameterServerContext
    from fsl_async.store.disk.chunk_files import FrameReader


DELTAS_AT_ONCE = 16
"""Streams of deltas to an evaluator that are open at a time; a receiver declines too many."""


@define(eq=False)
class Serving:
    """Streams of the parameter server to all clients, and the versions kept on disk for them."""

    ps: ParameterServerContext
    _streams: dict[tuple[str, str], tuple[Source, do.SendVersion, int]] = field(
        factory=dict, init=False
    )
    _fetching: dict[str, int] = field(factory=dict, init=False)
    """Client -> the version last sent to it, until it holds the newest."""
    _deltas: set[tuple[str, str]] = field(factory=set, init=False)
    """Streams of deltas to evaluators that are open."""
    _next: dict[str, deque[tuple[do.SendDelta, int]]] = field(factory=dict, init=False)
    """Evaluator -> the deltas that are sent as others end."""

    def sent(self, peer: str, stream: str) -> None:
        """Report a version that was completely sent."""
        self._delta_over(peer, stream)
        served = self._streams.pop((peer, stream), None)
        if served is not None:
            source, effect, number = served
            sent = ev.VersionSent(peer, effect.kind, effect.version, source.bytes_coded)
            self.ps.node.feed(sent, number)

    def failed(self, peer: str, stream: str) -> None:
        """Report a version that a client declined, or whose stream broke off."""
        self._delta_over(peer, stream)
        served = self._streams.pop((peer, stream), None)
        if served is not None:
            source, effect, number = served
            sent = ev.VersionSent(
                peer, effect.kind, effect.version, source.bytes_coded, is_lost=True
            )
            self.ps.node.feed(sent, number)

    def caught_up(self, peer: str) -> None:
        """Stop keeping versions for a client that holds the newest."""
        if self._fetching.pop(peer, None) is not None:
            self._keep_fetched()

    def measured(self, peer: str, version: int) -> None:
        """Stop keeping versions for a client that trains on one: the next come as scalars."""
        if version >= self._fetching.get(peer, version + 1):
            self.caught_up(peer)

    def left(self, peer: str) -> None:
        """Forget the streams of a session that is over."""
        self._next.pop(peer, None)
        self._deltas = {one for one in self._deltas if one[0] != peer}
        for stream in [one for one in self._streams if one[0] == peer]:
            del self._streams[stream]
        self.caught_up(peer)

    def serve(self, effect: do.SendVersion, number: int) -> None:
        """Offer a full version or an update."""

        # A version stays on disk until its client holds the newest one: a full version may take
        # longer to send than keep_versions last, and the client needs the updates after it next.
        def failed(error: Exception) -> None:
            self.ps.say(Note(f"cannot serve version {effect.version}: {error}", "warning"))

        if effect.kind == "seeds":
            self.ps.worker.submit(
                lambda: self.ps.store.read_seeds(effect.since, effect.version),
                lambda frame: self._send_seeds(effect, number, frame),
                failed,
            )
            return
        self._fetching[effect.peer] = effect.version
        self._keep_fetched()
        store = self.ps.store
        kept = store.groups if effect.kind == "global" else store
        self.ps.worker.submit(
            lambda: kept.has_update(effect.version),
            lambda kept: self._send_version(effect, number, kept=kept),
            failed,
        )

    def _send_seeds(self, effect: do.SendVersion, number: int, frame: bytes | None) -> None:
        if frame is None or len(frame) > MAX_BYTES:
            announcement = msg.Announce(effect.version, effect.digest, effect.position)
            self.ps.endpoint.send(effect.peer, msg.to_wire(announcement))
        if frame is None:
            self._send_version(effect, number, kept=False)
        elif len(frame) <= MAX_BYTES:
            message = msg.Scalars(effect.version, effect.digest, frame, effect.position)
            self.ps.endpoint.send(effect.peer, msg.to_wire(message))
            self._count(0, frame)
            sent = ev.VersionSent(effect.peer, effect.kind, effect.version, len(frame))
            self.ps.node.feed(sent, number)
        else:
            self._offer(effect, number, 1, lambda _: frame, lambda _: frame)

    def _keep_fetched(self) -> None:
        oldest = min(self._fetching.values(), default=None)
        self.ps.worker.submit(
            lambda: self.ps.store.keep_from(oldest), lambda _: None, lambda _: None
        )

    def _send_version(self, effect: do.SendVersion, number: int, *, kept: bool) -> None:
        if effect.kind in {"update", "seeds", "global"} and not kept:
            is_global = effect.kind == "global" and effect.version == self.ps.machine.version
            kind = "global_full" if is_global else "full"
            effect = do.SendVersion(effect.peer, kind, self.ps.machine.version)
            self._fetching[effect.peer] = effect.version
            self._keep_fetched()
        version = effect.version
        store, is_update = self.ps.store, effect.kind == "update"
        read_chunk = store.read_update if is_update else store.read_full
        if effect.kind == "global":
            read_chunk = store.groups.read_update
        self._offer(
            effect,
            number,
            self.ps.known_manifest().chunks,
            lambda index: read_chunk(version, index),
            lambda index: store.update_in_memory(version, index) if is_update else None,
        )

    def _offer(
        self,
        effect: do.SendVersion,
        number: int,
        chunks: int,
        read: Callable[[int], bytes | None],
        in_memory: Callable[[int], bytes | None],
    ) -> None:
        meta = msg.to_wire(msg.VersionMeta(effect.kind, effect.version))
        source = Source(
            chunks,
            self.ps.worker,
            read,
            self._count,
            in_memory=in_memory,
            failed=lambda error: self.ps.jobs.read_failed(error, number),
        )
        stream = msg.version_stream(effect.kind, effect.version)
        self._streams[(effect.peer, stream)] = source, effect, number
        self.ps.endpoint.offer(effect.peer, stream, meta, source, eager_bytes(chunks))

    def serve_delta(self, effect: do.SendDelta, number: int) -> None:
        """Offer a delta of the spool to the evaluator, as its client offered it, in its turn."""
        self._next.setdefault(effect.peer, deque()).append((effect, number))
        self._serve_next(effect.peer)

    def _serve_next(self, peer: str) -> None:
        waiting = self._next.get(peer, deque())
        while waiting and len(self._deltas) < DELTAS_AT_ONCE:
            effect, number = waiting.popleft()
            key = effect.delta.key
            if key in self.ps.machine.deltas.pending:  # else it was merged without a score
                self._deltas.add((peer, msg.delta_stream(key.text)))
                self._offer_delta(effect, number)

    def _delta_over(self, peer: str, stream: str) -> None:
        if (peer, stream) in self._deltas:
            self._deltas.discard((peer, stream))
            self._serve_next(peer)

    def _offer_delta(self, effect: do.SendDelta, number: int) -> None:
        key, peer = effect.delta.key, effect.peer
        stream = msg.delta_stream(key.text)

        def failed(error: Exception) -> None:
            self.ps.say(Note(f"cannot send delta {key.text}: {error}", "warning"))
            self._delta_over(peer, stream)

        def offer(reader: FrameReader) -> None:
            source = Source(
                reader.count,
                self.ps.worker,
                reader.frame,
                self._count,
                failed=lambda error: self.ps.jobs.read_failed(error, number),
            )
            # A site allows metrics and facts to the parameter server only.
            meta = msg.to_wire(msg.DeltaMeta(evolve(effect.delta, metrics={}, facts={})))
            self.ps.endpoint.offer(peer, stream, meta, source, eager_bytes(reader.count))

        self.ps.worker.submit(
            lambda: self.ps.store.spool_reader(key),
            offer,
            failed,
        )

    def _count(self, index: int, frame: bytes) -> None:
        self.ps.count(Direction.DOWN, index, frame)

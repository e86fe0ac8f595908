"""Sends versions and updates, read from the parameter server's store by its worker."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

import fsl_transport as tp
from fsl_async.nodes.runtime import Worker
from fsl_async.nodes.wire import eager_bytes, version_stream
from fsl_async.roles.machine import Event, Note
from fsl_async.roles.messages import MAX_BYTES
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.store.manifest import Manifest
from fsl_async.store.store import Store

AT_ONCE = 8
"""Chunks from memory that one turn of the loop may send; the next goes through the worker."""


class StoreSource:
    """Chunks of a version, from memory or read from disk by the worker. Counts their bytes."""

    def __init__(
        self,
        effect: do.SendVersion,
        chunks: int,
        worker: Worker,
        read: Callable[[int], bytes | None],
        *,
        in_memory: Callable[[int], bytes | None],
        count: Callable[[int, bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.effect = effect
        self.chunks = chunks
        self.bytes_coded = 0
        self._worker = worker
        self._read = read
        self._in_memory = in_memory
        self._count = count
        self._failed = failed

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Read a chunk; None when it is deleted."""

        def done(frame: bytes | None) -> None:
            if frame is not None:
                self.bytes_coded += len(frame)
                self._count(index, frame)
            deliver(frame)

        def failed(error: Exception) -> None:
            deliver(None)
            self._failed(error)

        frame = self._in_memory(index) if (index + 1) % AT_ONCE else None
        if frame is not None:
            done(frame)
        else:
            self._worker.submit(lambda: self._read(index), done, failed)


@define(kw_only=True, eq=False)
class Serving:
    """Streams of the parameter server to all clients, and the versions kept on disk for them."""

    store: Store
    worker: Worker
    endpoint: tp.ListenerEndpoint
    feed: Callable[[Event, int | None], None]
    manifest: Callable[[], Manifest]
    newest: Callable[[], int]
    """Returns the newest version."""
    say: Callable[[Note], None]
    read_failed: Callable[[Exception, int], None]
    """Takes the error of a read, and the number of its effect."""
    count: Callable[[int, bytes], None]
    """Takes each chunk that is read."""
    _streams: dict[tuple[str, str], tuple[StoreSource, int]] = field(factory=dict, init=False)
    _fetching: dict[str, int] = field(factory=dict, init=False)
    """Client -> the version last sent to it, until it holds the newest."""

    def sent(self, peer: str, stream: str) -> None:
        """Report a version that was completely sent."""
        served = self._streams.pop((peer, stream), None)
        if served is not None:
            source, number = served
            effect = source.effect
            self.feed(ev.VersionSent(peer, effect.kind, effect.version, source.bytes_coded), number)

    def failed(self, peer: str, stream: str) -> None:
        """Report a version that a client declined, or whose stream broke off."""
        served = self._streams.pop((peer, stream), None)
        if served is not None:
            source, number = served
            self.feed(ev.SendVersionFailed(peer, source.effect.version), number)

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
        for stream in [one for one in self._streams if one[0] == peer]:
            del self._streams[stream]
        self.caught_up(peer)

    def serve(self, effect: do.SendVersion, number: int) -> None:
        """Offer a full version or an update."""

        # A version stays on disk until its client holds the newest one: a full version may take
        # longer to send than keep_versions last, and the client needs the updates after it next.
        def failed(error: Exception) -> None:
            self.say(Note(f"cannot serve version {effect.version}: {error}", "warning"))

        if effect.kind == "seeds":
            self.worker.submit(
                lambda: self.store.read_seeds(effect.since, effect.version),
                lambda frame: self._send_seeds(effect, number, frame),
                failed,
            )
            return
        self._fetching[effect.peer] = effect.version
        self._keep_fetched()
        of_global = effect.kind == "global"
        has_update = self.store.has_global_update if of_global else self.store.has_update
        self.worker.submit(
            lambda: has_update(effect.version),
            lambda kept: self._send_version(effect, number, kept=kept),
            failed,
        )

    def _send_seeds(self, effect: do.SendVersion, number: int, frame: bytes | None) -> None:
        if frame is None or len(frame) > MAX_BYTES:
            announcement = msg.Announce(effect.version, effect.digest, effect.position)
            self.endpoint.send(effect.peer, msg.to_wire(announcement))
        if frame is None:
            self._send_version(effect, number, kept=False)
        elif len(frame) <= MAX_BYTES:
            message = msg.Scalars(effect.version, effect.digest, frame, effect.position)
            self.endpoint.send(effect.peer, msg.to_wire(message))
            self.count(0, frame)
            sent = ev.VersionSent(effect.peer, effect.kind, effect.version, len(frame))
            self.feed(sent, number)
        else:
            self._offer(effect, number, 1, lambda _: frame, lambda _: frame)

    def _keep_fetched(self) -> None:
        oldest = min(self._fetching.values(), default=None)
        self.worker.submit(lambda: self.store.keep_from(oldest), lambda _: None, lambda _: None)

    def _send_version(self, effect: do.SendVersion, number: int, *, kept: bool) -> None:
        if effect.kind in {"update", "seeds", "global"} and not kept:
            is_global = effect.kind == "global" and effect.version == self.newest()
            kind = "global_full" if is_global else "full"
            effect = do.SendVersion(effect.peer, kind, self.newest())
            self._fetching[effect.peer] = effect.version
            self._keep_fetched()
        version = effect.version
        store, is_update = self.store, effect.kind == "update"
        read_chunk = store.read_update if is_update else store.read_full
        if effect.kind == "global":
            read_chunk = store.read_global_update
        self._offer(
            effect,
            number,
            self.manifest().chunks,
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
        source = StoreSource(
            effect,
            chunks,
            self.worker,
            read,
            in_memory=in_memory,
            count=self.count,
            failed=lambda error: self.read_failed(error, number),
        )
        stream = version_stream(effect.kind, effect.version)
        self._streams[(effect.peer, stream)] = (source, number)
        self.endpoint.offer(effect.peer, stream, meta, source, eager_bytes(chunks))

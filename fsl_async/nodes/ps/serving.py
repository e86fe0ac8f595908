"""What a parameter server serves: versions and updates, read from its store by its one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.accounting.categories import Direction
from fsl_async.nodes.runtime import Worker
from fsl_async.nodes.wire import eager_bytes, version_stream
from fsl_async.roles.machine import Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg

if TYPE_CHECKING:
    from fsl_async.nodes.ps.shell import ParameterServerShell


class StoreSource:
    """Chunks of a version, read from disk by the worker. Counts the bytes it hands out."""

    def __init__(
        self,
        effect: do.SendVersion,
        chunks: int,
        worker: Worker,
        read: Callable[[int], bytes | None],
        *,
        count: Callable[[int, bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.effect = effect
        self.chunks = chunks
        self.bytes_coded = 0
        self._worker = worker
        self._read = read
        self._count = count
        self._failed = failed

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Read a chunk; None when it is not there any more."""

        def done(frame: bytes | None) -> None:
            if frame is not None:
                self.bytes_coded += len(frame)
                self._count(index, frame)
            deliver(frame)

        def failed(error: Exception) -> None:
            deliver(None)
            self._failed(error)

        self._worker.submit(lambda: self._read(index), done, failed)


class Serving:
    """The streams that go, to all clients, and what must stay on disk for them."""

    def __init__(self, shell: ParameterServerShell) -> None:
        self._shell = shell
        self._streams: dict[tuple[str, str], tuple[StoreSource, int]] = {}
        self._fetching: dict[str, int] = {}
        """Peer -> the version it was last sent, until it holds the newest."""

    def sent(self, peer: str, stream: str) -> None:
        """A client has all of a version."""
        served = self._streams.pop((peer, stream), None)
        if served is not None:
            source, number = served
            effect = source.effect
            self._shell.node.feed(
                ev.VersionSent(peer, effect.kind, effect.version, source.bytes_coded), number
            )

    def failed(self, peer: str, stream: str) -> None:
        """A client did not want it, or cannot have it."""
        served = self._streams.pop((peer, stream), None)
        if served is not None:
            source, number = served
            self._shell.node.feed(ev.SendVersionFailed(peer, source.effect.version), number)

    def caught_up(self, peer: str) -> None:
        """A client holds the newest version."""
        if self._fetching.pop(peer, None) is not None:
            self._keep_fetched()

    def left(self, peer: str) -> None:
        """The session of a client is over, and its streams with it."""
        for stream in [one for one in self._streams if one[0] == peer]:
            del self._streams[stream]
        self.caught_up(peer)

    def serve(self, effect: do.SendVersion, number: int) -> None:
        """Offer a version, or what leads to it."""
        # What is being fetched stays on disk until its client holds the newest version: a whole version may take longer to
        # send than keep_versions last, and the updates after it are needed next.
        self._fetching[effect.peer] = effect.version
        self._keep_fetched()
        self._shell.worker.submit(
            lambda: self._shell.store.has_update(effect.version),
            lambda kept: self._send_version(effect, number, kept=kept),
            lambda error: self._shell.say(
                Note(f"cannot serve version {effect.version}: {error}", "warning")
            ),
        )

    def _keep_fetched(self) -> None:
        oldest = min(self._fetching.values(), default=None)
        self._shell.worker.submit(
            lambda: self._shell.store.keep_from(oldest), lambda _: None, lambda _: None
        )

    def _send_version(self, effect: do.SendVersion, number: int, *, kept: bool) -> None:
        assert self._shell.manifest is not None
        if effect.kind == "update" and not kept:
            effect = do.SendVersion(effect.peer, "full", self._shell.machine.version)
            self._fetching[effect.peer] = effect.version
            self._keep_fetched()
        version = effect.version
        read_chunk = (
            self._shell.store.read_update
            if effect.kind == "update"
            else self._shell.store.read_full
        )
        meta = msg.to_wire(msg.VersionMeta(effect.kind, version))
        chunks = self._shell.manifest.chunks
        count = self._shell.counting(Direction.DOWN)
        source = StoreSource(
            effect,
            chunks,
            self._shell.worker,
            lambda index: read_chunk(version, index),
            count=count,
            failed=lambda error: self._shell.jobs.read_failed(error, number),
        )
        stream = version_stream(effect.kind, version)
        self._streams[(effect.peer, stream)] = (source, number)
        self._shell.endpoint.offer(effect.peer, stream, meta, source, eager_bytes(chunks))

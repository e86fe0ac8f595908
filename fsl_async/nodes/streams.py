"""The ends of a stream of chunks: the worker makes what is sent, and takes what arrives.

`TransferProgress` finds the peers whose streams advance: at its end a role waits for those only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from attrs import define

import fsl_transport as tp
from fsl_async.nodes.runtime import Worker
from fsl_async.roles.sync.events import TransfersChecked

AT_ONCE = 8
"""Chunks from memory that one turn of the loop may send; the next goes through the worker."""


@define(eq=False, slots=False)
class Source:
    """Chunks that the worker codes, or reads from disk, as the link has room.

    make: returns a chunk; None: it is deleted. count: called with each chunk. in_memory: returns a
    chunk that is in memory. failed: called with an error of `make`.
    """

    chunks: int
    _worker: Worker
    _make: Callable[[int], bytes | None]
    _count: Callable[[int, bytes], None] = lambda _, __: None
    _in_memory: Callable[[int], bytes | None] = lambda _: None
    _failed: Callable[[Exception], None] = lambda _: None

    def __attrs_post_init__(self) -> None:
        self.bytes_coded = 0

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Make a chunk; None when it is deleted, or that fails."""

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
            self._worker.submit(lambda: self._make(index), done, failed)


@define(eq=False, slots=False)
class Sink:
    """Passes the chunks of one stream to the worker. A chunk that it does not take ends the stream.

    problem: called with the error. count: called with each chunk that is taken.
    """

    _worker: Worker
    _take: Callable[[int, bytes], None]
    _count: Callable[[int, bytes], None] = lambda _, __: None
    _problem: Callable[[str], None] = lambda _: None

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Take a chunk in the worker."""

        def failed(error: Exception) -> None:
            self._problem(str(error))
            done(False)

        def taken(_: None) -> None:
            self._count(index, frame)
            done(True)

        frame = bytes(data)
        self._worker.submit(lambda: self._take(index, frame), taken, failed)


class TransferProgress:
    """Compares transfers with those at the last check; before the first check there were none."""

    def __init__(self) -> None:
        self._seen: dict[str, set[tuple[str, bool, int]]] = {}

    def look(
        self, transfers: Iterable[tp.Transfer], busy: Collection[str] = ()
    ) -> TransfersChecked:
        """The peers with a stream that began, advanced by a chunk or ended since the last check.

        busy: peers that count too, because what they sent is being stored.
        """
        now: dict[str, set[tuple[str, bool, int]]] = {}
        for transfer in transfers:
            place = (transfer.stream_id, transfer.sending, transfer.done)
            now.setdefault(transfer.peer, set()).add(place)
        before, self._seen = self._seen, now
        moved = {peer for peer in {*before, *now} if before.get(peer) != now.get(peer)}
        moved.update(busy)
        return TransfersChecked(tuple(sorted(moved)))

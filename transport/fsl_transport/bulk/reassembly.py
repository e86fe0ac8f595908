"""The receiving end of a session's stripes: acknowledgements, chunks put together from pieces, and what comes before it is wanted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fsl_transport.errors import PeerError
from fsl_transport.link import Buffer
from fsl_transport.session.frames import Chunk
from fsl_transport.settings import STRIPES_LIMIT

PIECE_OVERHEAD_BYTES: Final = 256
"""What keeping a piece takes besides its payload, rather more than less."""


class Arrivals:
    """Which pieces came on which stripe, as ranges that are told when the sender asks."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[int, list[int]] = {}  # stripe -> first and last piece not told yet

    def piece(self, stripe: int, seq: int, *, asks: bool) -> Sequence[tuple[int, int, int]]:
        """A piece came: ``(stripe, first, last)`` to acknowledge now. ``PeerError`` for a stripe that cannot be."""
        if not 0 <= stripe < STRIPES_LIMIT or seq < 1:
            raise PeerError(f"piece {seq} of stripe {stripe}")
        found = self._open.get(stripe)
        told: list[tuple[int, int, int]] = []
        if found is None:
            found = self._open[stripe] = [seq, seq]
        elif seq == found[1] + 1:
            found[1] = seq
        else:  # something is missing or late: the sender should know soon
            told.append((stripe, found[0], found[1]))
            found[:] = [seq, seq]
            asks = True
        if asks:
            told.append((stripe, found[0], found[1]))
            del self._open[stripe]
        return told


class Assembly:
    """One chunk of which some pieces are there."""

    __slots__ = ("_data", "_left", "_seen", "round")

    def __init__(self, size: int, round_: int) -> None:
        self.round = round_
        self._data = bytearray(size)
        self._left = size
        self._seen: set[int] = set()

    def add(self, chunk: Chunk) -> Buffer | None:
        """Put a piece in its place; the chunk when that was the last one. A piece that is there already is ignored."""
        if chunk.offset in self._seen:
            return None
        size = len(chunk.payload)
        self._left -= size
        if self._left < 0:
            raise PeerError(f"pieces of chunk {chunk.index} overlap")
        self._seen.add(chunk.offset)
        self._data[chunk.offset : chunk.offset + size] = chunk.payload
        return self._data if self._left == 0 else None


class EagerChunks:
    """Pieces of streams that are not accepted yet: bounded; of which some did not fit is remembered. ``bytes`` are what they take."""

    __slots__ = ("_kept", "_missed", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._kept: dict[int, list[Chunk]] = {}
        self._missed: set[int] = set()

    def keep(self, chunk: Chunk, room_bytes: int, max_streams: int) -> int:
        """Keep a piece until its stream is accepted; its OFFER may still be on the way. Returns the bytes that it takes; 0: dropped."""
        if chunk.round:
            raise PeerError(f"a chunk of round {chunk.round} of a stream that is not accepted")
        size = len(chunk.payload) + PIECE_OVERHEAD_BYTES
        streams = len(self._kept) + (chunk.stream not in self._kept)
        if size <= room_bytes and streams <= max_streams:
            self._kept.setdefault(chunk.stream, []).append(chunk)
            self.bytes += size
            return size
        if len(self._missed) < max_streams:
            self._missed.add(chunk.stream)
        return 0

    def take(self, number: int) -> tuple[list[Chunk], bool]:
        """What was kept of a stream, and whether some of it was not."""
        missed = number in self._missed
        self._missed.discard(number)
        kept = self._kept.pop(number, [])
        self.bytes -= sum(len(chunk.payload) + PIECE_OVERHEAD_BYTES for chunk in kept)
        return kept, missed

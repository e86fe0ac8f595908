"""Receiving end of a session's stripes: acknowledgements, reassembly, eager pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fsl_transport.errors import PeerError
from fsl_transport.link import Buffer
from fsl_transport.session.frames import Chunk
from fsl_transport.settings import STRIPES_LIMIT

PIECE_OVERHEAD_BYTES: Final = 256
"""Upper estimate of the memory that a kept piece takes besides its payload."""


class AckRanges:
    """Ranges of pieces received on each stripe and not acknowledged yet."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[int, list[int]] = {}  # stripe -> first and last piece

    def on_piece(self, stripe: int, number: int, *, asks: bool) -> Sequence[tuple[int, int, int]]:
        """A piece arrived. Return the ``(stripe, first, last)`` to acknowledge now.

        ``PeerError`` for a stripe or number out of range.
        """
        if not 0 <= stripe < STRIPES_LIMIT or number < 1:
            raise PeerError(f"piece {number} of stripe {stripe}")
        found = self._open.get(stripe)
        ranges: list[tuple[int, int, int]] = []
        if found is None:
            found = self._open[stripe] = [number, number]
        elif number == found[1] + 1:
            found[1] = number
        else:  # a gap or a late piece: report it early
            ranges.append((stripe, found[0], found[1]))
            found[:] = [number, number]
            asks = True
        if asks:
            ranges.append((stripe, found[0], found[1]))
            del self._open[stripe]
        return ranges


class Reassembly:
    """One chunk of which some pieces have arrived."""

    __slots__ = ("_data", "_missing_bytes", "_offsets", "round")

    def __init__(self, size: int, round_: int) -> None:
        self.round = round_
        self._data = bytearray(size)
        self._missing_bytes = size
        self._offsets: set[int] = set()

    def add(self, chunk: Chunk) -> Buffer | None:
        """Copy a piece to its offset; return the chunk if it is complete. Ignore a duplicate."""
        if chunk.offset in self._offsets:
            return None
        size = len(chunk.payload)
        self._missing_bytes -= size
        if self._missing_bytes < 0:
            raise PeerError(f"pieces of chunk {chunk.index} overlap")
        self._offsets.add(chunk.offset)
        self._data[chunk.offset : chunk.offset + size] = chunk.payload
        return self._data if self._missing_bytes == 0 else None


class EagerPieces:
    """Pieces of streams that are not accepted yet. ``bytes`` is the memory they take.

    Streams of which pieces did not fit are remembered, so that these are requested after ACCEPT.
    """

    __slots__ = ("_kept", "_missed", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._kept: dict[int, list[Chunk]] = {}
        self._missed: set[int] = set()

    def keep(self, chunk: Chunk, free_bytes: int, max_streams: int) -> int:
        """Keep a piece until its stream is accepted; it may overtake the OFFER.

        Return the bytes that it takes; 0 means that it did not fit and was dropped.
        """
        if chunk.round:
            raise PeerError(f"a chunk of round {chunk.round} of a stream that is not accepted")
        size = len(chunk.payload) + PIECE_OVERHEAD_BYTES
        streams = len(self._kept) + (chunk.stream not in self._kept)
        if size <= free_bytes and streams <= max_streams:
            self._kept.setdefault(chunk.stream, []).append(chunk)
            self.bytes += size
            return size
        if len(self._missed) < max_streams:
            self._missed.add(chunk.stream)
        return 0

    def take(self, number: int) -> tuple[list[Chunk], bool]:
        """Remove and return the pieces of a stream, and whether any were dropped."""
        missed = number in self._missed
        self._missed.discard(number)
        kept = self._kept.pop(number, [])
        self.bytes -= sum(len(chunk.payload) + PIECE_OVERHEAD_BYTES for chunk in kept)
        return kept, missed

"""Frames between the parameter server, its helper and the helper's children.

    4 bytes    length of the rest, little-endian, at most MAX_FRAME
    the rest   msgpack, a map

To the helper, with "do":

    reduce     attempt, rank, weights (one for each rank), piece_values, base, cut, residual (or
               empty), out (paths), skip (bytes before the values in each file), values, host (to
               bind), timeout_s, bytes_per_s (0: no limit)
    address    attempt, key, blob: of another rank
    kill       -

From it, with "is":

    ready      torch is imported
    address    attempt, key, blob: of this rank, for the others
    done       attempt: the result is at `out`, complete and synced
    failed     attempt, reason
"""

from __future__ import annotations

import os
from typing import Any

import msgpack  # type: ignore[import-untyped]

MAX_FRAME = 1 << 20
HEAD_BYTES = 4


def pack(frame: dict[str, Any]) -> bytes:
    """Return the bytes of a frame."""
    body: bytes = msgpack.packb(frame)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


class Frames:
    """Frames from bytes that arrive in pieces. ValueError: they are none."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """Take the next bytes; return the frames that are complete now."""
        self._bytes += data
        found = []
        while len(self._bytes) >= HEAD_BYTES:
            length = int.from_bytes(self._bytes[:HEAD_BYTES], "little")
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._bytes) < HEAD_BYTES + length:
                break
            found.append(read(self._bytes[HEAD_BYTES : HEAD_BYTES + length]))
            self._bytes = self._bytes[HEAD_BYTES + length :]
        return found


def read(body: bytes) -> dict[str, Any]:
    """Return the map in a frame. ValueError: it is none."""
    try:
        frame = msgpack.unpackb(body)
    except (msgpack.UnpackException, ValueError) as error:
        raise ValueError(f"a frame is no msgpack: {error}") from None
    if not isinstance(frame, dict):
        raise ValueError("a frame is no map")  # noqa: TRY004 - a peer's bytes, not our types
    return frame


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
